"""The report is one file that needs no network, its numbers are the log's, and nothing that users name runs in it."""

from __future__ import annotations

import base64
import hashlib
import html
import math
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from perfguard import Estimate, Limit, Measurement, MeasurementStore, Prediction, Verdict
from perfguard.cli import main
from perfguard.exceptions import ConfigurationError, LogError
from perfguard.log import Selection
from perfguard.record import TrialRecord
from perfguard.report import Report, page_of, read_report, write_report
from perfguard.unmodelled import DATA_PARALLEL
from tests.doubles import TOY_GPU

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytest.importorskip("plotly")
GIB = 2**30
CARD = replace(TOY_GPU, id="card", name="Made-up Card", memory_bytes=40 * GIB)
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\"&amp;"
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NUM_TRIALS = 1000


def write_study(store: MeasurementStore, num_trials: int, *, study: str = "made up", name: str = "augment") -> None:
    """Write decisions and the measurements of those that are launched, as a guard would; the same each time."""
    rng = random.Random(0)
    for number in range(num_trials):
        params = {"width": rng.randint(16, 512), "optimizer": rng.choice(["sgd", "adamw"]), name: {"nested": name}}
        memory_bytes, seconds = 4e6 * rng.uniform(16, 12_000), rng.uniform(1000, 9000)
        memory, step, total = (
            Estimate.of_physics(value / 2, 0.2, "at peak rates").then(
                "network", "as measured", median=value * math.exp(rng.gauss(0, 0.1)), log_sigma=0.1
            )
            for value in (memory_bytes, seconds / 1000, seconds)
        )
        prediction = Prediction(memory, step, total, "made-up-1", CARD.id, trained_on_device=True)
        limits = [Limit("memory", 32 * GIB, memory), Limit("time", 7200.0, total)]
        verdict = Verdict.of(prediction, limits, accepted=0.05)
        decision_id = store.record_decision(verdict, graph=None, device=CARD, study=study, trial=number, params=params)
        if verdict.action == "launch":
            taken_s = seconds * (4.0 if number % 4 == 0 else 1.0)  # now and then another program runs beside it
            measurement = Measurement("ok", CARD.id, CARD.name, int(memory_bytes), taken_s / 1000, taken_s, 1000, "nvml", "torch")
            store.record_measurement(decision_id, measurement)


@pytest.fixture(scope="module")
def store() -> Iterator[MeasurementStore]:
    with MeasurementStore(":memory:") as store:
        write_study(store, 60)
        yield store


def values_of(page: str, column: int) -> list[float | None]:
    """The numbers of a column of the table of trials."""
    table = page.partition('<table id="trials">')[2].partition("</table>")[0]
    rows = re.findall(r"<tr data-outcome.*?</tr>", table, re.DOTALL)
    cells = [re.findall(r"<t[dh][^>]*>", row)[column] for row in rows]
    found = [re.search(r'data-value="([^"]*)"', cell) for cell in cells]
    return [float(match[1]) if match is not None and match[1] else None for match in found]


def test_the_numbers_of_the_table_are_those_of_the_log(store: MeasurementStore) -> None:
    page, records = page_of(read_report(store)), store.records()
    assert {record.in_words for record in records} == {"launched", "pruned"}
    assert values_of(page, 0) == [record.number for record in records]
    assert values_of(page, 3) == [record.predicted["memory"].median for record in records]
    assert values_of(page, 4) == [record.measured.get("memory") for record in records]
    assert values_of(page, 5) == [record.predicted["time"].median for record in records]
    assert values_of(page, 6) == [record.measured.get("time") for record in records]
    for label, value in read_report(store).summary.rows():
        assert f'<th scope="row">{label}</th><td>{value}</td>' in page, "the summary is the guard's"


def test_the_prediction_that_is_furthest_off_is_explained(store: MeasurementStore) -> None:
    page, records = page_of(read_report(store)), store.records()
    whole = [record for record in records if record.error("time") is not None]
    furthest = max(whole, key=lambda record: abs(math.log(record.measured["time"] / record.predicted["time"].median)))
    assert "How the predicted peak memory came to be" in page
    assert f"trial {furthest.number}, the furthest from its measurement, predicted" in page


def test_what_a_prediction_does_not_model_stands_beside_the_reason() -> None:
    memory = Estimate(2.0 * GIB, 0.1)
    prediction = Prediction(memory, memory, None, "made-up-1", CARD.id, trained_on_device=True, unmodelled=(DATA_PARALLEL,))
    verdict = Verdict.of(prediction, [Limit("memory", 32 * GIB, memory)], accepted=0.05)
    with MeasurementStore(":memory:") as store:
        store.record_decision(verdict, graph=None, device=CARD, study="s", trial=0, params={})
        page = page_of(read_report(store))
    assert f"{verdict.reason}; not modelled: data-parallel" in html.unescape(page)


def test_hostile_names_are_text_and_the_policy_allows_our_scripts_alone() -> None:
    with MeasurementStore(":memory:") as store:
        write_study(store, 12, study=HOSTILE, name=HOSTILE)
        page = page_of(read_report(store))
    assert "<img" not in page.partition("</script>")[2], "after Plotly's own code"
    policy = re.search(r'content="(default-src[^"]*)"', page)
    assert policy is not None
    assert "script-src 'unsafe" not in policy[1]
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL)
    digests = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts}
    assert set(re.findall(r"'sha256-([^']*)'", policy[1])) == digests
    assert not [script for script in scripts if "window.hacked" in script and "\\u003c" not in script]


@pytest.mark.parametrize("value", ["\ud800", "\0", "x" * 10_000, math.nan, 10**400, None, [1, "<b>"]])
def test_odd_hyperparameters_are_shown(value: Any, tmp_path: Path) -> None:
    records = [TrialRecord(number=0, verdict=None, params={"lr": value})]
    path = tmp_path / "deep" / "report.html"
    path.parent.mkdir()
    path.write_bytes(page_of(Report(title="odd", source="test", records=records)).encode("utf-8", "replace"))
    assert path.read_text(encoding="utf-8").count("<tr data-outcome") == 1


def test_a_log_of_several_studies_is_reported_whole_or_by_study() -> None:
    with MeasurementStore(":memory:") as store:
        write_study(store, 3, study="one")
        write_study(store, 2, study="two")
        assert read_report(store).title == "2 studies"
        assert page_of(read_report(store)).count("<td>one</td>") == 3
        assert len(read_report(store, study="two").records) == 2
        with pytest.raises(LogError, match=r"no decision of study 'three'\. It has 'one', 'two'"):
            read_report(store, study="three")


def test_forgotten_readings_count_in_no_part_of_the_page() -> None:
    """The table said "0 of 3 measured", and the picture drew the readings and counted them."""
    with MeasurementStore(":memory:") as store:
        write_study(store, 20, study="good")
        write_study(store, 20, study="bad")
        num_forgotten = store.set_aside(Selection(study="bad"), "forgotten")
        report = read_report(store)
    page, summary = page_of(report), report.summary
    assert num_forgotten > 0
    assert summary.num_measured == summary.num_launched - num_forgotten
    counted = {int(number) for number in re.findall(r"\d+ of (\d+) measured trials lie", page)}
    ended_well = sum(record.is_measured and not record.violates for record in report.records)
    assert ended_well <= min(counted)
    assert max(counted) <= summary.num_measured
    shown = [record for record in report.records if record.counted("memory") is not None]
    assert len([value for value in values_of(page, 5) if value is not None]) == len(shown) == summary.num_measured


def test_the_command_writes_the_report_of_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MeasurementStore(tmp_path / "log.db") as store:
        write_study(store, 3)
    out = tmp_path / "deep" / "report.html"
    assert main(["report", str(tmp_path / "log.db"), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert "<h1>made up</h1>" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.db", "There is no file 'nowhere.db'"),
        ("sqlite:///nowhere.db", "There is no database at 'sqlite:///nowhere.db'"),
        ("no url://", "That is no URL of a database"),
        (__file__, "neither a measurement log nor a study"),
        (3, "neither a measurement log nor a study"),
    ],
)
def test_a_source_that_cannot_be_read_is_named(source: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_report(source)


def test_a_report_that_cannot_be_written_is_named(store: MeasurementStore) -> None:
    with pytest.raises(ConfigurationError, match="cannot be written"):
        write_report(store, "/proc/nowhere/report.html")


# --- In a real browser ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    webdriver = pytest.importorskip("selenium.webdriver")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no Chromium here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for word in ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,900"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    yield browser
    browser.quit()


def errors(browser: Chrome) -> list[dict[str, Any]]:
    return [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def choose(browser: Chrome, name: str, value: str) -> None:
    script = (
        "const box = document.getElementById(arguments[0]); box.value = arguments[1];"
        "box.dispatchEvent(new Event(box.tagName === 'INPUT' ? 'input' : 'change'))"
    )
    browser.execute_script(script, name, value)


@pytest.mark.slow
def test_a_thousand_trials_are_shown_sorted_and_filtered(browser: Chrome, tmp_path: Path) -> None:
    with MeasurementStore(":memory:") as store:
        write_study(store, NUM_TRIALS)
        path = write_report(store, tmp_path / "report.html")
        report = read_report(store)
    assert path.stat().st_size <= 7_000_000, "Plotly takes 4.6 MB of it"
    browser.get(path.as_uri())
    assert errors(browser) == []
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert [name for name in loaded if not name.startswith(("data:", "blob:"))] == [], "nothing comes from the network"
    assert browser.execute_script("return document.querySelectorAll('.plot .main-svg').length") >= 3, "the pictures are drawn"

    column = "return [...document.querySelectorAll('#trials tbody tr')].map(row => row.cells[3].dataset.value)"
    expected = [record.predicted["memory"].median for record in report.records]
    assert [float(value) for value in browser.execute_script(column)] == expected
    browser.execute_script("document.querySelectorAll('#trials thead button')[3].focus()")
    browser.switch_to.active_element.send_keys("\n")
    assert [float(value) for value in browser.execute_script(column)] == sorted(expected)
    browser.switch_to.active_element.send_keys(" ")
    assert [float(value) for value in browser.execute_script(column)] == sorted(expected, reverse=True)

    choose(browser, "outcome", "pruned")
    shown = "return [...document.querySelectorAll('#trials tbody tr')].filter(row => !row.hidden).length"
    assert browser.execute_script(shown) == report.summary.num_pruned
    choose(browser, "words", "takes optimizer=sgd")
    pruned = [record for record in report.records if record.is_pruned and record.params["optimizer"] == "sgd"]
    assert browser.execute_script(shown) == sum("takes" in record.reason for record in pruned) > 0
    assert errors(browser) == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [375, 500, 1300])
def test_the_page_never_scrolls_sideways(browser: Chrome, tmp_path: Path, width: int) -> None:
    """STRANGERS.md A9: on a phone the page scrolled sideways."""
    with MeasurementStore(":memory:") as store:
        write_study(store, 30, study=HOSTILE, name=HOSTILE)
        path = write_report(store, tmp_path / "report.html")
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    )
    browser.get(path.as_uri())
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.find_element("tag name", "h1").text == HOSTILE
    cut = (
        "return [...document.querySelectorAll('h1, h2, h3, main > p, .plot text')]"
        ".filter(one => one.textContent && !one.closest('.legend'))"
        ".filter(one => one.getBoundingClientRect().right > window.innerWidth || one.getBoundingClientRect().left < 0)"
        ".map(one => one.textContent)"
    )
    assert browser.execute_script(cut) == [], "no title is cut"
    assert browser.execute_script("return window.hacked === undefined && !document.querySelector('img, [onerror]')")
    assert errors(browser) == [], "the policy had nothing to refuse"
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
