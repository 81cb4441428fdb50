"""One predictor for many runs: a Ray actor, and what happens when it is away."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from torch import nn

import perfguard
from perfguard import Guard, Measurement, Workload, load_predictor, resolve_device, trace
from perfguard.exceptions import ConfigurationError, LogCorruptError, ServiceWarning
from perfguard_ray import SharedPredictor
from perfguard_ray import _service as service

A100 = resolve_device("a100")


def workload(width: int) -> Workload:
    return Workload(nn.Linear(64, width), inputs=(32, 64), loss=torch.mean, steps=30)


def measurement(seconds: float) -> Measurement:
    return Measurement("ok", A100.id, A100.name, 700 * 2**20, seconds, 30 * seconds, 30, "nvml", "torch")


@contextmanager
def service_of(log: Path, name: str) -> Iterator[SharedPredictor]:
    predictor = SharedPredictor(log=str(log), name=name)
    yield predictor
    predictor.stop()


@pytest.fixture(scope="module")
def shared(ray_on_this_machine: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPredictor]:
    """A service that learns nothing, for all tests: its process takes seconds to start."""
    with service_of(tmp_path_factory.mktemp("service") / "log.db", "shared") as predictor:
        yield predictor


def wait_until(condition: Any, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


@pytest.mark.slow
def test_service_answers_as_the_predictor(shared: SharedPredictor) -> None:
    graphs = [trace(workload(width)) for width in (24, 40)]  # of which no other test asks
    before = shared.status()["predictions"]
    here = load_predictor()
    assert shared.name == here.name
    for graph in graphs:
        answer, expected = shared.predict(graph, A100, steps=10), here.predict(graph, A100, steps=10)
        assert answer.peak_memory.median == pytest.approx(expected.peak_memory.median)
        assert answer.total_time is not None
        assert expected.total_time is not None
        assert answer.total_time.median == pytest.approx(expected.total_time.median)
    questions = [(graph, A100, 10) for graph in graphs * 20]
    assert len(shared.predict_many(questions)) == 40
    assert shared.status()["predictions"] == before + 2, "equal questions are answered once"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*was not trained on such steps")
@pytest.mark.usefixtures("local_ray")
def test_service_learns_across_runs(tmp_path: Path) -> None:
    with service_of(tmp_path / "log.db", "learning") as learning:
        teacher, pupil = (Guard("a100", predictor=learning, log=learning.log) for _ in range(2))
        copy = pickle.loads(pickle.dumps(learning))
        before = pupil.check(workload(64)).prediction
        assert before is not None
        for width in (16, 32, 64, 128):
            teacher.learn(teacher.decide(lambda width=width: workload(width)), measurement(2 * before.step_time.median))  # type: ignore[misc]
        wait_until(lambda: learning.status()["observations"] == 4)
        for predictor in (pupil.predictor, copy):
            after = predictor.predict(pupil.trace(workload(64)), A100)
            assert after.step_time.median == pytest.approx(2 * before.step_time.median, rel=0.2)


@pytest.mark.slow
def test_a_service_of_another_version_is_not_asked(shared: SharedPredictor, monkeypatch: pytest.MonkeyPatch) -> None:
    version = perfguard.__version__
    monkeypatch.setattr(perfguard, "__version__", "99.0")
    with pytest.warns(ServiceWarning, match=f"it belongs to PerfGuard {version}, this is 99.0. Install one version everywhere"):
        newer = SharedPredictor(log=shared.log, name=shared.service_name)
    assert newer.predict(trace(workload(8)), A100).peak_memory.median > 0


@pytest.mark.slow
def test_foreign_actor_of_the_name_is_not_asked(shared: SharedPredictor) -> None:
    class Other:
        def ping(self) -> None: ...

    other: Any = ray.remote(num_cpus=0)(Other)
    other = other.options(name="taken", namespace=service.NAMESPACE, lifetime="detached").remote()
    ray.get(other.ping.remote())
    with pytest.warns(ServiceWarning, match="it cannot be started or reached"):
        predictor = SharedPredictor(log=shared.log, name="taken")
    assert predictor.predict(trace(workload(8)), A100).peak_memory.median > 0
    ray.kill(other)


@pytest.mark.slow
def test_service_for_another_log_needs_another_name(shared: SharedPredictor, tmp_path: Path) -> None:
    """Runs with another log or predictor must not share a service."""
    with pytest.raises(ConfigurationError, match=r"has the log .*give this run's service another name"):
        SharedPredictor(log=str(tmp_path / "other.db"), name=shared.service_name)
    with pytest.raises(ConfigurationError, match=r"has the predictor 'guardnet', but this run needs 'trees'"):
        SharedPredictor(log=shared.log, predictor="trees", name=shared.service_name)


@pytest.mark.slow
def test_restarted_service_relearns_from_the_log(shared: SharedPredictor) -> None:
    guard = Guard("a100", predictor=shared, log=shared.log)
    graph = guard.trace(workload(64))
    learnt = shared.predict(graph, A100).step_time.median
    ray.kill(shared._server, no_restart=False)
    wait_until(lambda: shared.status().get("questions") == 0)  # it is a new process
    assert shared.predict(graph, A100).step_time.median == pytest.approx(learnt)


@pytest.mark.slow
def test_service_away_falls_back_and_is_found_again(shared: SharedPredictor, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the service is away, this process predicts."""
    graph = trace(workload(64))
    expected = shared.predict(graph, A100)
    ray.kill(shared._server)
    with pytest.warns(ServiceWarning, match="cannot be reached: it has died.*This process predicts instead") as caught:
        answers = [shared.predict(graph, A100) for _ in range(3)]
    assert len(caught) == 1
    assert [answer.peak_memory.median for answer in answers] == pytest.approx([expected.peak_memory.median] * 3)
    assert shared.status() == {}
    monkeypatch.setattr(service, "_RETRY_AFTER_S", 0.0)
    wait_until(lambda: bool(shared.status()))


def test_service_without_cluster_says_what_to_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigurationError, match=r"Call ray.init\(\) before"):
        SharedPredictor(log=str(tmp_path / "log.db"))


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_a_log_that_cannot_be_used_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "log.db").write_text("no database")
    with pytest.raises(LogCorruptError):
        SharedPredictor(log=str(tmp_path / "log.db"))
    with pytest.raises(ConfigurationError, match="must be the path or URL"):
        SharedPredictor(log=False)  # type: ignore[arg-type]
