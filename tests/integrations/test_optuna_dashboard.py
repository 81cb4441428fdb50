"""The real optuna-dashboard on a real study in SQLite, looked at in a real, headless Chromium."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import optuna
import pytest
import torch
from torch import nn

from perfguard import Workload
from perfguard.exceptions import TrackingWarning
from perfguard.quantities import format_bytes
from perfguard_optuna import DashboardCallback, PerfGuardPruner, create_study, record_of, summarize
from tests.doubles import TOY_CPU, ReplayPredictor

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.slow
SOON_S = 60
WIDTHS = [64, 2**13, 2**9, 2**14]  # the second and the last do not fit


def build(params: Mapping[str, Any]) -> Workload:
    return Workload(nn.Linear(64, params["width"]), inputs=(8, 64), loss=torch.mean, steps=3)


def objective(trial: optuna.Trial) -> float:
    if trial.number == 0:
        pytest.importorskip("optuna_dashboard").save_note(trial, "A note of *my own*")
    model = nn.Linear(64, trial.suggest_categorical("width", WIDTHS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(8, 64)).mean().backward()
        optimizer.step()
    return float(model.out_features)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The storage of a guarded study whose callback has written what the dashboard shows."""
    optuna_dashboard = pytest.importorskip("optuna_dashboard")
    url = f"sqlite:///{tmp_path_factory.mktemp('dashboard') / 'study.db'}"
    study = create_study(storage=url, study_name="shown")
    for width in WIDTHS:
        study.enqueue_trial({"width": width})
    pruner = PerfGuardPruner(
        TOY_CPU, build=build, memory_budget="2MiB", time_budget="10s", predictor=ReplayPredictor(), log=False
    )
    callback = DashboardCallback()
    study.optimize(objective, n_trials=4, count="proposed", pruner=pruner, callbacks=[callback])
    callback.write(study)
    callback.write(study)  # a second time changes nothing
    first, note = study.trials[0]._trial_id, optuna_dashboard._note
    attributes = study._storage.get_study_system_attrs(study._study_id)
    body = note.get_note_from_system_attrs(attributes, first)["body"]
    note.save_note_with_version(study._storage, study._study_id, first, 3, f"{body}\n\nMore of my own")  # as the page does
    callback.write(study)
    return url


def test_notes_are_written_once_and_the_users_stay(url: str) -> None:
    from optuna_dashboard._note import get_note_from_system_attrs

    study = optuna.load_study(study_name="shown", storage=url)
    attributes = study._storage.get_study_system_attrs(study._study_id)
    notes = [get_note_from_system_attrs(attributes, trial._trial_id) for trial in study.trials]
    assert [note["version"] for note in notes] == [3, 1, 1, 1]
    assert notes[0]["body"].startswith("A note of *my own*\n\n**PerfGuard: launched**: needs ")
    assert notes[0]["body"].endswith(
        "\n- Learnt from: 0 runs\n- The run ended as: ok\n\n[//]: # (PerfGuard ends here)\n\nMore of my own"
    )
    assert notes[1]["body"].startswith("**PerfGuard: pruned before launch**: needs ")
    assert "\n- Learnt from: 1 run\n" in notes[1]["body"]


def test_pictures_that_fail_are_not_drawn_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_drawn = 0

    def broken(*_: Any, **__: Any) -> None:
        nonlocal num_drawn
        num_drawn += 1
        raise RuntimeError("no picture")

    study = optuna.create_study()
    study.add_trials([optuna.trial.create_trial(value=1.0), optuna.trial.create_trial(value=2.0)])
    callback = DashboardCallback()
    monkeypatch.setattr(callback._dashboard, "save_plotly_graph_object", broken)
    with pytest.warns(TrackingWarning, match="no picture"):
        callback(study, study.trials[0])
    callback._not_before = 0.0
    callback(study, study.trials[1])
    assert num_drawn == 1
    assert callback._waiting == []


@pytest.fixture
def address(url: str) -> Iterator[str]:
    """The dashboard's address; it runs in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = f"import sys; sys.argv[1:] = [{url!r}, '--port', '{port}']; from optuna_dashboard._cli import main; main()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            address = f"http://127.0.0.1:{port}/dashboard"
            for _ in range(10 * SOON_S):
                try:
                    urllib.request.urlopen(address, timeout=SOON_S).close()
                    break
                except OSError:
                    assert server.poll() is None, "the dashboard has ended"
                    time.sleep(0.1)
            yield address
        finally:
            server.terminate()


@pytest.fixture
def browser() -> Iterator[Chrome]:
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no Chromium here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for word in ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        yield browser
        browser.quit()


def text_of(browser: Chrome, page: str, *expected: str) -> str:
    """The text of a page, once it has all that is ``expected``."""
    browser.get(page)
    for _ in range(2 * SOON_S):
        text = str(browser.execute_script("return document.body.textContent"))
        if all(part in text for part in expected):
            return text
        time.sleep(0.5)
    pytest.fail(f"{[part for part in expected if part not in text]} not on {page}: {text[:3000]}")


def test_the_dashboard_shows_verdicts_numbers_with_units_and_pictures(address: str, url: str, browser: Chrome) -> None:
    study = optuna.load_study(study_name="shown", storage=url)
    launched, pruned = (record_of(trial) for trial in study.trials[:2])
    assert (launched.verdict, pruned.verdict) == ("launch", "prune")

    # A trial: its verdict in words, and its numbers with units. The raw attributes have their units in their names.
    needed = format_bytes(pruned.predicted["memory"])
    text_of(
        browser, f"{address}/studies/1/trials?numbers=1", "PerfGuard: pruned before launch", "perfguard:memory:predicted_bytes"
    )
    rows = [
        [cell.text for cell in row.find_elements("css selector", "th, td")] for row in browser.find_elements("css selector", "tr")
    ]
    low, high = map(format_bytes, pruned.intervals["memory"])
    assert rows[0] == ["", "predicted", "90% interval", "measured", "budget", "constraint"]
    assert rows[1] == ["peak memory", needed, f"{low} to {high}", "–", "2.00 MiB", "broken"]
    assert rows[2][0::4] == ["trial time", "10.0 s"]
    assert rows[2][-1] == "holds"
    measured = format_bytes(launched.measured["memory"])
    text = text_of(
        browser, f"{address}/studies/1/trials?numbers=0", "A note of my own", "More of my own", measured, "The run ended as: ok"
    )
    assert "broken" not in text
    shown = browser.find_element("tag name", "body").text
    assert "More of my own" in shown
    assert "ends here" not in shown

    # The study: the summary as a note, and the pictures below the dashboard's own.
    text_of(
        browser,
        f"{address}/studies/1/note",
        "PerfGuard: summary",
        "trials pruned before launch",
        summarize(study).pruned_in_words,
    )
    titles = "What the guard saved", "Predicted against measured peak memory", "Predicted against measured trial time"
    text_of(browser, f"{address}/studies/1", *titles)
    assert [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
