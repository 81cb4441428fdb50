"""One predictor for a whole cluster: a Ray actor that serves every run, and learns from their common log."""

from __future__ import annotations

import asyncio
import time
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

import perfguard
from perfguard.devices import Device
from perfguard.exceptions import ConfigurationError, PredictorError, ServiceWarning
from perfguard.graph import OpGraph
from perfguard.learning import LogSync
from perfguard.log import MeasurementStore
from perfguard.predictor import DEFAULT_PREDICTOR, Observation, Prediction, Predictor, load_predictor

NAMESPACE = "perfguard"
DEFAULT_NAME = "predictor"
_PROTOCOL = 1
"""Version of the messages between client and server. The versions of PerfGuard must be equal, too."""
_MOST_GRAPHS = 4096
_MOST_ANSWERS = 65_536
_START_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 5.0
_RETRY_AFTER_S = 10.0


class SharedPredictor:
    """The predictor service, as a predictor. The guards of any number of Tune runs may share it.

    Three lines that a Tune user adds::

        predictor = perfguard_ray.SharedPredictor(log="postgresql+psycopg://user@host/perfguard")
        search = PerfGuardSearcher(OptunaSearch(), gpu="a100", build=build, predictor=predictor, log=predictor.log)
        with perfguard_ray.measure():  # in the training function, around its body

    The first request starts the service, a detached actor. It continues when the script ends, and ``stop()`` ends it. Ray
    restarts it when it dies, and it reads the log again. If it cannot be reached or has another version of PerfGuard, this
    process predicts from the runs that it has read of the log. One :class:`ServiceWarning` reports it. The service is tried again
    every ten seconds.

    Args:
        predictor: the predictor's name. It must be installed.
        log: path or URL of the measurement log. The service must reach it. Use PostgreSQL, unless the cluster is one machine.
        name: of the actor, in the namespace "perfguard". Runs with another predictor or another log need another name.

    Raises:
        ConfigurationError: if there is a service of that name with another predictor or another log.
        LogError: if the log cannot be used.
    """

    def __init__(self, *, log: str, predictor: str = DEFAULT_PREDICTOR, name: str = DEFAULT_NAME) -> None:
        if not isinstance(log, str):
            raise ConfigurationError(
                f"log must be the path or URL of a measurement log that the service can reach, but got {log!r}."
            )
        if not ray.is_initialized():
            raise ConfigurationError("The predictor service lives in a Ray cluster. Call ray.init() before SharedPredictor(...).")
        self.log = log
        self.predictor_name = predictor
        self.service_name = name
        self._observations: Sequence[Observation] = ()
        self._server: Any = None
        self._away_since = float("-inf")
        self._warned = False
        self._name: str | None = None
        self._local: Predictor | None = None
        MeasurementStore(log).close()
        self._connect()

    @property
    def name(self) -> str:
        """Name and version of the predictor that serves this run."""
        return self._name or self._here().name

    def predict(self, graph: OpGraph, device: Device, *, steps: int | None = None) -> Prediction:
        """Predict in the service, or in this process while it is away; see :class:`perfguard.predictor.Predictor`."""
        return self.predict_many([(graph, device, steps)])[0]

    def predict_many(self, questions: Sequence[tuple[OpGraph, Device, int | None]]) -> list[Prediction]:
        """Same as :meth:`predict`, for several graphs with one call to the service."""
        if self._reachable():
            try:
                return self._remote_predictions(questions)
            except RayActorError as error:
                self._lose(f"it has died ({type(error).__name__})")
            except GetTimeoutError:
                self._lose(f"it did not answer within {_ANSWER_TIMEOUT_S:g} s")
            except RayError as error:
                self._lose(f"{type(error).__name__}: {str(error).splitlines()[-1]}")
        here = self._here()
        return [here.predict(graph, device, steps=steps) for graph, device, steps in questions]

    def fine_tune(self, observations: Sequence[Observation]) -> None:
        """Notify the service of new rows in the log, which it reads itself. ``observations`` are used while it is away."""
        self._observations = observations
        if self._local is not None:
            self._local.fine_tune(observations)
        if self._reachable():
            for device_id in {observation.device.id for observation in observations}:
                self._server.learn.remote(device_id)

    def status(self) -> dict[str, Any]:
        """Counters of the service; empty while it is away."""
        try:
            return dict(ray.get(self._server.status.remote(), timeout=_ANSWER_TIMEOUT_S)) if self._reachable() else {}
        except RayError:
            return {}

    def stop(self) -> None:
        """End the service for all runs."""
        if self._server is not None:
            ray.kill(self._server)
        self._server, self._away_since = None, time.monotonic()

    def _remote_predictions(self, questions: Sequence[tuple[OpGraph, Device, int | None]]) -> list[Prediction]:
        requests = [_Question(graph.content_hash, None, device, steps) for graph, device, steps in questions]
        answers = ray.get(self._server.predict.remote(requests), timeout=_ANSWER_TIMEOUT_S)
        unknown = [index for index, answer in enumerate(answers) if answer is None]
        if unknown:  # the service has never seen these graphs
            again = [requests[index]._replace(graph=questions[index][0].to_bytes()) for index in unknown]
            for index, answer in zip(
                unknown, ray.get(self._server.predict.remote(again), timeout=_ANSWER_TIMEOUT_S), strict=True
            ):
                answers[index] = answer
        for answer in answers:
            if isinstance(answer, str):
                raise PredictorError(answer)
        return list(answers)

    def _reachable(self) -> bool:
        if self._server is None and time.monotonic() - self._away_since > _RETRY_AFTER_S:
            self._connect()
        return self._server is not None

    def _connect(self) -> None:
        """Find the service or start it, and see whether it is the right one."""
        try:
            options = {"name": self.service_name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True}
            actor: Any = ray.remote(num_cpus=0, max_restarts=-1)(PredictorServer)
            server = actor.options(**options).remote(self.predictor_name, self.log)
            info = ray.get(server.hello.remote(), timeout=_START_TIMEOUT_S)
        except (RayError, AttributeError) as error:  # AttributeError: an actor of that name which is no such service
            self._lose(f"it cannot be started or reached ({type(error).__name__}: {str(error).splitlines()[-1]})")
            return
        found, expected = ((one["version"], one["protocol"]) for one in (info, service_info(self.predictor_name, self.log)))
        if found != expected:
            self._lose(
                f"it belongs to PerfGuard {found[0]}, this is {expected[0]}. Install one version everywhere, or give this run's "
                f"service another name"
            )
            return
        for what, ours in (("predictor", self.predictor_name), ("log", _safe(self.log))):
            if info[what] != ours:
                raise ConfigurationError(
                    f"The predictor service {self.service_name!r} has the {what} {info[what]!r}, but this run needs "
                    f"{ours!r}. Use the same, or give this run's service another name: SharedPredictor(name=...)."
                )
        self._server, self._name = server, info["name"]

    def _lose(self, why: str) -> None:
        self._server, self._away_since = None, time.monotonic()
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"The predictor service {self.service_name!r} cannot be reached: {why}. This process predicts instead, and "
                f"tries the service again every {_RETRY_AFTER_S:g} s (shown once).",
                ServiceWarning,
                stacklevel=4,
            )

    def _here(self) -> Predictor:
        if self._local is None:
            self._local = load_predictor(self.predictor_name)
            self._local.fine_tune(self._observations)
        return self._local

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("log", "predictor_name", "service_name", "_name", "_warned")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _observations=(), _local=None, _server=None, _away_since=float("-inf"))


class _Question(NamedTuple):
    graph_hash: str
    graph: bytes | None
    """The graph; None: the service may have it already."""
    device: Device
    steps: int | None


def service_info(predictor: str, log: str) -> dict[str, Any]:
    """The first reply of a service: plain texts and numbers, so that any version can read it."""
    return {"version": perfguard.__version__, "protocol": _PROTOCOL, "predictor": predictor, "log": _safe(log)}


class PredictorServer:
    """The service, an actor. Calls overlap; predicting and learning take turns in one thread.

    Answers are kept until the service has learnt something about the device, and equal questions that arrive together are
    answered once.
    """

    def __init__(self, predictor: str, log: str) -> None:
        self._info = service_info(predictor, log)
        self._predictor = load_predictor(predictor)
        self._log = MeasurementStore(log)
        self._graphs: OrderedDict[str, OpGraph] = OrderedDict()
        self._answers: OrderedDict[Any, asyncio.Task[Prediction | str]] = OrderedDict()
        self._sync = LogSync(self._predictor, self._log)
        self._thread = ThreadPoolExecutor(1)
        self._to_learn: set[str] = set()
        self._learning: asyncio.Task[None] | None = None
        self._counts = {"questions": 0, "predictions": 0, "updates": 0, "observations": 0}
        for device_id in self._log.device_ids():
            self._fine_tune(device_id)

    async def hello(self) -> dict[str, Any]:
        """Version, protocol, predictor and log of the service."""
        return {**self._info, "name": self._predictor.name}

    async def status(self) -> dict[str, Any]:
        """Counts since the start of this process: requests, predictions, updates and observations learnt."""
        return dict(self._counts)

    async def predict(self, questions: Sequence[_Question]) -> list[Prediction | str | None]:
        """Predictions in order. A text is an error. None: the service does not know the graph, and the request lacks it."""
        self._counts["questions"] += len(questions)
        return [await self._answer(question) for question in questions]

    async def learn(self, device_id: str) -> None:
        """Schedule learning from a device's new rows in the log. Calls until then are merged into one."""
        self._to_learn.add(device_id)
        if self._learning is None or self._learning.done():
            self._learning = asyncio.get_running_loop().create_task(self._learn())

    async def _answer(self, question: _Question) -> Prediction | str | None:
        graph = self._graph(question)
        if graph is None:
            return None
        key = (question.graph_hash, repr(question.device), question.steps)
        if key not in self._answers:
            self._answers[key] = asyncio.get_running_loop().create_task(self._predict(graph, question))
            if len(self._answers) > _MOST_ANSWERS:
                self._answers.popitem(last=False)
        return await self._answers[key]

    def _graph(self, question: _Question) -> OpGraph | None:
        if question.graph is not None and question.graph_hash not in self._graphs:
            self._graphs[question.graph_hash] = OpGraph.from_bytes(question.graph)
            if len(self._graphs) > _MOST_GRAPHS:
                self._graphs.popitem(last=False)
        return self._graphs.get(question.graph_hash)

    async def _predict(self, graph: OpGraph, question: _Question) -> Prediction | str:
        self._counts["predictions"] += 1

        def predict() -> Prediction:
            return self._predictor.predict(graph, question.device, steps=question.steps)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, predict)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    async def _learn(self) -> None:
        while self._to_learn:
            device_id = self._to_learn.pop()
            await asyncio.get_running_loop().run_in_executor(self._thread, self._fine_tune, device_id)
            self._answers.clear()

    def _fine_tune(self, device_id: str) -> None:
        try:
            observations = self._sync.update(device_id).observations
        except Exception as error:  # a service that cannot learn still predicts
            warnings.warn(f"The predictor service could not learn: {type(error).__name__}: {error}", ServiceWarning, stacklevel=2)
            return
        self._counts["updates"] += 1
        self._counts["observations"] = len(observations)


def _safe(log: str) -> str:
    """A URL without its password."""
    return repr(MeasurementStore(log))
