"""The report in a real, headless Chromium: Debian's packages chromium and chromium-driver."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from perfguard import MeasurementStore
from perfguard.report import Report, report_of_log, write_report
from tests.perfguard.report.made_up import HOSTILE, write_study

pytest.importorskip("plotly")
webdriver = pytest.importorskip("selenium.webdriver")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="no Chromium here: apt-get install chromium chromium-driver"),
]

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

NUM_TRIALS = 1000
MOST_BYTES = 5_000_000
SHOWN = "return [...document.querySelectorAll('#trials tbody tr')].filter(row => !row.hidden)"
SOON_S = 60


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for word in ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,900"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    browser.set_script_timeout(SOON_S)
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def report(folder: Path) -> Report:
    with MeasurementStore(":memory:") as store:
        write_study(store, NUM_TRIALS)
        write_report(store, folder / "report.html")
        return report_of_log(store)


def open_page(browser: Chrome, path: Path) -> None:
    """Open a page, scroll through it, and wait until each chart is drawn."""
    browser.get(path.as_uri())
    browser.execute_async_script("""
        const done = arguments[0], charts = [...document.querySelectorAll("[data-chart]")];
        const step = () => {
          const missing = charts.find(chart => !chart.querySelector(".main-svg"));
          if (!missing) return done();
          missing.scrollIntoView();
          setTimeout(step, 50);
        };
        step();
    """)


def errors(browser: Chrome) -> list[dict[str, Any]]:
    return [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def choose(browser: Chrome, name: str, value: str) -> None:
    browser.execute_script(
        "const box = document.getElementById(arguments[0]); box.value = arguments[1];"
        "box.dispatchEvent(new Event(box.tagName === 'INPUT' ? 'input' : 'change'))",
        name,
        value,
    )


def test_thousand_trials_are_shown_sorted_and_filtered(browser: Chrome, report: Report, folder: Path) -> None:
    path = folder / "report.html"
    assert path.stat().st_size <= MOST_BYTES
    open_page(browser, path)
    assert errors(browser) == []
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [name for name in loaded if not name.startswith(("data:", "blob:"))] == [], "nothing comes from the network"

    # Its numbers are the log's.
    column = "return [...document.querySelectorAll('#trials tbody tr')].map(row => row.cells[arguments[0]].dataset.value)"
    heads = browser.execute_script("return [...document.querySelectorAll('#trials thead th')].map(head => head.innerText)")
    memory = next(index for index, head in enumerate(heads) if head.startswith("Peak memory, predicted"))
    expected = [trial.record.predicted["memory"] for trial in report.trials]
    assert [float(value) for value in browser.execute_script(column, memory)] == expected
    traces = "document.querySelector('[data-chart=fit]').data.filter(trace => trace.x[0] !== null)"
    assert sum(browser.execute_script(f"return {traces}.map(trace => trace.x.length)")) == NUM_TRIALS

    # It sorts by keyboard, and what is not known stays at the end.
    browser.execute_script("document.querySelectorAll('#trials thead button')[arguments[0]].focus()", memory)
    browser.switch_to.active_element.send_keys("\n")
    assert [float(value) for value in browser.execute_script(column, memory)] == sorted(expected)
    browser.switch_to.active_element.send_keys(" ")
    assert [float(value) for value in browser.execute_script(column, memory)] == sorted(expected, reverse=True)
    measured = [trial.record.measured.get("memory") for trial in report.trials]
    browser.execute_script("document.querySelectorAll('#trials thead button')[arguments[0]].click()", memory + 1)
    values = [float(value) if value else None for value in browser.execute_script(column, memory + 1)]
    known = sorted(value for value in measured if value is not None)
    assert values == known + [None] * (NUM_TRIALS - len(known))
    assert browser.execute_script("return document.querySelectorAll('[aria-sort=ascending]').length") == 1

    # It filters by outcome and by words.
    choose(browser, "outcome", "pruned")
    assert len(browser.execute_script(SHOWN)) == report.summary.num_pruned
    choose(browser, "words", "takes optimizer=sgd")
    both = [
        trial
        for trial in report.trials
        if trial.outcome == "pruned" and "takes" in trial.record.reason and trial.params["optimizer"] == "sgd"
    ]
    assert 0 < len(browser.execute_script(SHOWN)) == len(both)
    assert browser.find_element("id", "shown").text == f"{len(both)} of {NUM_TRIALS} trials shown"
    assert errors(browser) == []


def test_map_follows_its_controls_and_charts_the_colour_scheme(browser: Chrome, report: Report, folder: Path) -> None:
    open_page(browser, folder / "report.html")
    chart = "document.getElementById('border-chart')"
    title = f"return {chart}.layout.xaxis.title.text + ' ' + {chart}.layout.yaxis.title.text"
    assert browser.execute_script(f"return {chart}.data.some(trace => trace.mode === 'lines')"), "the border is drawn"
    names = browser.execute_script("return [...document.getElementById('x').options].map(option => option.text)")
    choose(browser, "x", str(names.index("optimizer")))
    choose(browser, "y", "")
    choose(browser, "budget", "memory")
    assert browser.execute_script(title) == "optimizer predicted, as a share of the budget"
    shares = [trial.record.predicted["memory"] / trial.record.limits["memory"] for trial in report.trials]
    assert browser.execute_script(f"return {chart}.data[0].y") == pytest.approx(shares, rel=1e-5)
    background = f"return {chart}.layout.paper_bgcolor + getComputedStyle(document.body).backgroundColor"
    light = browser.execute_script(background)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]})
    browser.execute_async_script(f"""
        const done = arguments[0], wait = () => ({chart}.layout.paper_bgcolor === "#15171a" ? done() : setTimeout(wait, 20));
        wait();
    """)
    dark = browser.execute_script(background)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert (light, dark) == ("#ffffffrgb(255, 255, 255)", "#15171argb(21, 23, 26)")
    assert errors(browser) == []


def test_hostile_names_do_not_run(browser: Chrome, folder: Path) -> None:
    with MeasurementStore(":memory:") as store:
        write_study(store, 20, study=HOSTILE, hostile=True)
        path = write_report(store, folder / "hostile.html")
    open_page(browser, path)
    names = browser.execute_script("return [...document.getElementById('x').options].map(option => option.text)")
    choose(browser, "x", str(names.index(HOSTILE)))
    assert browser.find_element("tag name", "h1").text == HOSTILE
    assert browser.execute_script("return window.hacked === undefined && !document.querySelector('img, [onerror]')")
    assert errors(browser) == [], "the policy had nothing to refuse"
