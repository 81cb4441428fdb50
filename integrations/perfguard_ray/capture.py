"""guarded: a training function whose trials are judged by a dry run of the function itself, before Tune starts an actor."""

from __future__ import annotations

import collections
import copy
import functools
import inspect
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import tune
from ray.tune.search import BasicVariantGenerator, create_searcher
from ray.tune.utils import flatten_dict

from perfguard.capture import Answer, Ask, DryRuns
from perfguard.exceptions import CaptureError, ConfigurationError, TooLargeError, UnguardedTrialWarning, warn_user
from perfguard.guard import Guard
from perfguard_ray.callback import PerfGuardCallback, measure, measured
from perfguard_ray.ledger import InThisProcess, Ledger, ledger_of, make_ledger
from perfguard_ray.search import PerfGuardSearcher, PerfGuardVariantGenerator, saved_ledger
from perfguard_ray.worker import Facts, asked_facts, play_steps, pretend_session

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from perfguard.devices import Device
    from perfguard.guard import GuardSettings
    from perfguard.workload import CapturedTrial


class TrainableBuild(DryRuns):
    """``build(config)``, by dry runs of the training function. Each is a task of Ray without a GPU, in a process of its own.

    Args:
        trainable: the training function, or the class.
        device: the guarded device.
        most_seconds: how long a dry run may take, its process included.
        network: leave the network open in dry runs.
    """

    captures: bool = True

    def __init__(self, trainable: Any, device: Device, *, most_seconds: float = 120.0, network: bool = False) -> None:
        super().__init__(trainable, device, most_seconds=most_seconds, network=network)

    @property
    def trainable_name(self) -> str:
        """The name that Tune's trials of it begin with."""
        return getattr(self._objective, "__name__", "trial")

    def __reduce__(self) -> Any:  # what was seen stays here
        return functools.partial(type(self), network=self._network), (self._objective, self._device)

    def start(self) -> None:
        """Ray starts the processes."""

    def __call__(self, params: Mapping[str, object]) -> CapturedTrial:
        """Return what a trial with the configuration ``params`` would run.

        Raises:
            CaptureError: if the dry run does not show it.
            TooLargeError: if a tensor of it does not fit into any memory.
        """
        self._config = params
        answers = iter([_answer(name, value) for name, value in flatten_dict(dict(params)).items()])
        return self.capture(lambda: next(answers))

    def _run(self, answer: Callable[..., Answer], answers: dict[str, Answer], *, spares: bool) -> CapturedTrial | Exception:
        config = copy.deepcopy(dict(self._config))
        with suppress(StopIteration):
            while True:
                found = answer()
                answers[found.name] = found
                _put(config, found)
        known = self._remembered.of(answers)
        if known is not None:
            return known
        began = time.monotonic()
        most_s = max(self._most_seconds, 10 * self._longest_s)
        play = functools.partial(_play, self._objective, config, asked_facts.get())
        task = _dry_run.remote(play, self._device, spares, most_s, self._network)
        try:
            result: CapturedTrial | Exception = ray.get(task, timeout=most_s + 10)
        except ray.exceptions.GetTimeoutError:
            ray.cancel(task, force=True)
            return CaptureError(f"the dry run of the objective did not end within {most_s:.0f} s")
        except ray.exceptions.RayError as error:  # it took too much memory, or the process has ended
            return CaptureError(f"the process of the dry run has ended ({type(error).__name__})")
        self._longest_s = max(self._longest_s, time.monotonic() - began)
        if not isinstance(result, Exception):
            self.note_seconds(result.seconds)
        return result


def _answer(name: str, value: object) -> Answer:
    """A float may be a learning rate, which does not change the step. Half of it shows whether it is."""
    return Answer(name, value, value / 2 if isinstance(value, float) and value else None)


def _put(config: dict[str, Any], found: Answer) -> None:
    """Change the value of a parameter, by its name in the flat configuration."""
    *groups, last = found.name.split("/")
    if found.name in config:
        config[found.name] = found.value
    else:
        functools.reduce(dict.__getitem__, groups, config)[last] = found.value


@ray.remote(num_cpus=0, num_gpus=0, max_calls=1, max_retries=0)  # the trials that run may have all processors
def _dry_run(
    play: Callable[[Ask], None], device: Device, spares: bool, most_seconds: float, network: bool
) -> CapturedTrial | Exception:
    """Dry-run in a process that this worker forks: the worker itself has threads of Ray, so it can have no view of its own."""
    warnings.simplefilter("ignore")
    runs = DryRuns(play, device, most_seconds=most_seconds, spares=spares, network=network)
    try:
        return runs.capture(_fetch)
    except (CaptureError, TooLargeError) as problem:
        return problem
    finally:
        runs.close()


class _Fetched:
    """Objects of Ray. They are no parameters of a trial, so all of them are alike."""

    def __init__(self, values: object) -> None:
        self.values = values

    def __repr__(self) -> str:
        return "objects of Ray"


def _fetch(ids: Sequence[bytes]) -> Answer:
    """Get objects of Ray for the dry run, which cannot reach its store."""
    return Answer("objects of Ray", _Fetched(ray.get([ray.ObjectRef(each) for each in ids])))


def _play(trainable: Any, config: dict[str, Any], facts: Facts, ask: Ask) -> None:
    def get(refs: Any, **_: Any) -> Any:
        is_one = isinstance(refs, ray.ObjectRef)
        found = ask([ref.binary() for ref in ([refs] if is_one else refs)]).values
        return found[0] if is_one else found

    ray.get = get  # type: ignore[assignment]
    pretend_session(facts)
    trial = trainable(config)
    if inspect.isclass(trainable):
        play_steps(trial.step)
    elif inspect.isgenerator(trial):  # it runs as its results are asked for
        collections.deque(trial, maxlen=0)


def guarded(trainable: Any, gpu: str | Device = "auto", **settings: Unpack[GuardSettings]) -> Any:
    """Return ``trainable`` for ``tune.Tuner``, guarded: what would run out of memory or time never becomes a trial.

    Before each trial, the training function runs in a task without a GPU where nothing is computed, and shows what the trial
    would run. Where that fails, the trial is judged at its first training forward pass, in its own process, and ends there if it
    does not fit. The search of the ``tune_config`` is wrapped in a :class:`PerfGuardSearcher` or a
    :class:`PerfGuardVariantGenerator`, and the trials are measured.

    Example:
        >>> tune.Tuner(perfguard_ray.guarded(train, gpu="a100"), param_space=space).fit()           # doctest: +SKIP

    :func:`summarize` and :func:`resources` take the guarded function in the place of a search.

    Args:
        trainable: the training function, or the Trainable class. ``tune.with_parameters`` belongs inside.
        gpu: as for :class:`perfguard.Guard`. A catalog name such as "a100", "auto" or "cpu".
        settings: further arguments of :class:`perfguard.Guard`: memory_budget, time_budget, risk, log and so on.

    Raises:
        ConfigurationError: for something that is not a trainable, an unknown GPU, or a budget that cannot be right.
    """
    if not callable(trainable):
        raise ConfigurationError(f"guarded takes a training function or a Trainable class, but got {trainable!r}.")
    guard = Guard(gpu, **settings)
    ledger = make_ledger(TrainableBuild(trainable, guard.device, network=guard.dry_run_network), guard, "auto", None, {})

    given: Any = measured(trainable) if isinstance(trainable, type) else _measuring(trainable)
    given.perfguard = InThisProcess(ledger)
    _let_tuner_wire()
    return given


def _measuring(trainable: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    """Return a training function that is measured. Tune reads the results of one that yields them, and knows it by its kind."""

    @functools.wraps(trainable)
    def measuring(config: dict[str, Any]) -> Any:
        with measure():
            return trainable(config)

    @functools.wraps(trainable)
    def measuring_each(config: dict[str, Any]) -> Iterator[Any]:
        with measure():
            yield from trainable(config)

    return measuring_each if inspect.isgeneratorfunction(trainable) else measuring


@functools.cache
def _let_tuner_wire() -> None:
    """Let ``tune.Tuner`` give a guarded trainable its search and its callback, to which a trainable has no way of its own."""
    plain = tune.Tuner.__init__

    @functools.wraps(plain)
    def __init__(tuner: tune.Tuner, trainable: Any = None, **options: Any) -> None:
        if isinstance(getattr(trainable, "perfguard", None), InThisProcess):
            options = _wired(trainable.perfguard.ledger, options)
        elif any(_is_guarded(cell) for cell in getattr(trainable, "__closure__", None) or ()):
            raise ConfigurationError(
                "A guarded function is wrapped, so nothing would guard it. Write guarded(tune.with_parameters(train, ...))."
            )
        plain(tuner, trainable, **options)
        _adopt(options.get("_tuner_internal"))

    tune.Tuner.__init__ = __init__  # type: ignore[assignment, method-assign]


def _adopt(restored: Any) -> None:
    """Let the guarded trainable of a run that ``Tuner.restore`` has read show the ledger of that run.

    ``restored`` is what Tune has made of it (private, Ray 2.43 to 2.60). None: the Tuner is a new one.
    """
    here = getattr(getattr(restored, "trainable", None), "perfguard", None)
    if not isinstance(here, InThisProcess):
        return
    try:
        here.ledger = ledger_of(restored._tune_config.search_alg, who="Tuner.restore")
    except ConfigurationError:
        warn_user(
            "The run was begun without a guard, so its trials run unguarded now, too. Begin a new run with the guarded function.",
            UnguardedTrialWarning,
        )
        return
    config = restored._run_config
    state = saved_ledger(Path(config.storage_path, config.name).expanduser())
    if state is not None:
        here.ledger.set_state(state)


def _is_guarded(cell: Any) -> bool:
    with suppress(ValueError):  # the cell is empty
        return isinstance(getattr(cell.cell_contents, "perfguard", None), InThisProcess)
    return False


def _wired(ledger: Ledger, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a Tuner, with the guarded search in the place of its own, and the callback before the loggers."""
    tune_config = copy.copy(options.get("tune_config")) or tune.TuneConfig()
    run_config = copy.copy(options.get("run_config")) or tune.RunConfig()
    given: Any = tune_config.search_alg
    search: Any
    if isinstance(given, PerfGuardSearcher | PerfGuardVariantGenerator):
        raise ConfigurationError("Both the training function and the search are guarded. Give one of them as it was.")
    if isinstance(given, str):
        given = create_searcher(given)
    if given is None or isinstance(given, BasicVariantGenerator):
        given = given or BasicVariantGenerator(max_concurrent=tune_config.max_concurrent_trials or 0)
        tune_config.max_concurrent_trials = None  # the generator's own
        search = PerfGuardVariantGenerator(given, guard=ledger.guard, build=ledger.build)
    else:
        search = PerfGuardSearcher(given, guard=ledger.guard, build=ledger.build)
    search.ledger = ledger
    tune_config.search_alg = search
    run_config.callbacks = [PerfGuardCallback(search), *(run_config.callbacks or [])]
    return options | {"tune_config": tune_config, "run_config": run_config}
