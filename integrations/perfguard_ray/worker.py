"""What happens in the process of a trial, beside the user's code, and what it and the driver send each other.

the driver    sends, when a trial starts, what is wanted of it: a captured step, or why a dry run has shown none
the trial     holds a real step against the captured one, and sends the difference; or it forks at the first forward pass
              of its training, sends what a dry run from there on has seen, and waits for the verdict
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import ray
from ray import cloudpickle, tune
from ray.experimental import internal_kv

from perfguard.capture.ranks import torchrun_variables
from perfguard.exceptions import CaptureError

if TYPE_CHECKING:
    from ray.tune.experiment import Trial

    from perfguard.capture.first_forward import FirstForward
    from perfguard.capture.real import RealStep
    from perfguard.measure import Run
    from perfguard.workload import CapturedTrial

Topic = Literal["wanted", "seen", "verdict", "difference"]


def send(trial_id: str, topic: Topic, content: object) -> bool:
    """Leave ``content`` for the other side, in the store through which Tune sends trainables. False: Ray fails, so it is lost."""
    with suppress(Exception):
        internal_kv._internal_kv_put(_key(trial_id, topic), cloudpickle.dumps(content))
        return True
    return False


def receive(trial_id: str, topic: Topic) -> Any:
    """Take what the other side has sent. None: nothing."""
    with suppress(Exception):
        if ray.is_initialized() and (found := internal_kv._internal_kv_get(_key(trial_id, topic))) is not None:
            internal_kv._internal_kv_del(_key(trial_id, topic))
            return cloudpickle.loads(found)
    return None


def forget(trial_id: str) -> None:
    """Remove what nobody has taken: a worker may have died before it did."""
    with suppress(Exception):
        if ray.is_initialized():
            internal_kv._internal_kv_del(_key(trial_id, ""), del_by_prefix=True)


def _key(trial_id: str, topic: Topic | Literal[""]) -> str:
    return f"perfguard/{ray.get_runtime_context().get_job_id()}/{trial_id}/{topic}"  # a job is a driver with its workers


class TrialRejected(Exception):
    """Ends a trial that does not fit, at the first forward pass of its training."""


class Watch:
    """Does in a trial what the driver wants of it. Unasked it does nothing. A ``trial_id`` of None: this process has no trial."""

    def __init__(self, trial_id: str | None) -> None:
        self._trial_id = trial_id or ""
        self._has_begun = trial_id is None
        self._real_step: RealStep | None = None

    def training(self, run: Run) -> AbstractContextManager[FirstForward | None]:
        """Return the block in which the trial of ``run`` begins to train. It raises TrialRejected if the trial does not fit."""
        wanted = None if self._has_begun else receive(self._trial_id, "wanted")
        self._has_begun = True
        if wanted is None:
            return nullcontext()
        from perfguard.capture.first_forward import FirstForward  # a third of a second, which other trials need not spend
        from perfguard.capture.real import RealStep

        device, found = wanted
        if not isinstance(found, CaptureError):
            self._real_step = RealStep(found, device.kind)
            return nullcontext()

        before_s = run.elapsed_s  # a class was set up before this block

        def judge(seen: CapturedTrial | Exception, *, most_seconds: float = 600.0) -> None:
            ends_at = time.monotonic() + most_seconds  # the driver may be in the dry run of another trial
            with run.left_out(after_s=first_forward.waited_s):
                is_sent = send(self._trial_id, "seen", (seen, before_s + first_forward.set_up_s))
                reason = None
                while is_sent and (reason := receive(self._trial_id, "verdict")) is None and time.monotonic() < ends_at:
                    time.sleep(0.05)
            if reason:
                raise TrialRejected(reason)

        first_forward = FirstForward(device, judge, pretend_session, problem=found)
        return first_forward

    def after_step(self, optimizer: object) -> None:
        """Hold a step of ``optimizer`` against the captured one."""
        if self._real_step is not None:
            self._real_step.after_step(optimizer)
            if self._real_step.difference is not None:
                send(self._trial_id, "difference", self._real_step.difference)
                self._real_step.difference = None  # it is sent once

    def close(self) -> None:
        """The trial is over."""
        if self._real_step is not None:
            self._real_step.close()


def play_steps(step: Callable[[], object]) -> None:
    """Make the steps of a Trainable class that a dry run has to see."""
    for _ in range(3):
        step()
    raise CaptureError("a Trainable class does not say when it ends")


def session_here() -> Any:
    """Whatever ``tune.report`` or ``ray.train.report`` of this process talks to; None outside both."""
    from ray.train._internal.session import get_session

    session = get_session()
    if session is not None:
        return session
    try:
        from ray.train.v2._internal.execution.train_fn_utils import get_train_fn_utils

        return get_train_fn_utils()
    except (ImportError, RuntimeError):
        return None


@dataclass(frozen=True, slots=True)
class Facts:
    """What a training function may ask of its trial."""

    trial_id: str = "dry-run"
    trial_name: str = "dry-run"
    trial_resources: Any = field(default_factory=lambda: tune.PlacementGroupFactory([{"CPU": 1.0}]))
    trial_dir: str = ""
    """Empty, or not made yet: the working directory of the process."""
    experiment_name: str = "dry-run"
    loaded_checkpoint: Any = None
    """From which the trial goes on. None: it begins anew."""

    @staticmethod
    def of(trial: Trial) -> Facts:
        """Return those of a trial of Tune, from the driver. Its resources are not known before Tune has accepted it."""
        known: Any = {name: getattr(trial, name, None) for name in ("storage", "placement_group_factory", "checkpoint")}
        folder = ""
        with suppress(RuntimeError, AttributeError):  # it has no folder yet
            folder = str(trial.local_path)
        return Facts(
            trial_id=trial.trial_id,
            trial_name=str(trial),
            trial_resources=known["placement_group_factory"] or Facts().trial_resources,
            trial_dir=folder,
            experiment_name=getattr(known["storage"], "experiment_dir_name", "dry-run"),  # a trial made by hand has no storage
            loaded_checkpoint=known["checkpoint"],
        )

    @staticmethod
    def of_session(session: object) -> Facts:
        """Return those of the trial of this process. A ``session`` of None: it has none."""
        known = {one.name: getattr(session, one.name, None) for one in fields(Facts)}
        return Facts(**{name: value for name, value in known.items() if value is not None})


asked_facts: ContextVar[Facts] = ContextVar("perfguard_ray_facts", default=Facts())  # noqa: B039 - it is frozen
"""Facts of the trial for which a dry run is made."""


@contextmanager
def asked_for(facts: Facts) -> Iterator[None]:
    """A ``with`` block in which what a configuration would run is asked for a trial with these ``facts``."""
    token = asked_facts.set(facts)
    try:
        yield
    finally:
        asked_facts.reset(token)


def pretend_session(facts: Facts | None = None) -> None:
    """What ``tune.report`` and the context talk to in a dry run. It reports nothing. A session is private (Ray 2.7 to 2.60).

    Args:
        facts: of the trial. None: those of the session of this process, in which the trial has begun.
    """
    from ray import actor, remote_function
    from ray.train._internal import session

    def refuse(*_: object, **__: object) -> None:
        raise CaptureError("The training function starts other processes of Ray, which a dry run does not see. Use build=...")

    for remote in (actor.ActorClass, remote_function.RemoteFunction):  # before anything of them is sent to the cluster
        remote._remote = refuse  # type: ignore[method-assign]
    internal_kv.global_gcs_client = None  # what Ray notes of its use, for instance, would wait for the cluster for ever
    with suppress(ImportError):
        from ray.train.v2.torch.torch_trainer import TorchTrainer

        if "_get_local_controller" in vars(TorchTrainer):  # older ones cannot run in this process
            TorchTrainer.fit = _run_first_worker  # type: ignore[assignment, method-assign]
    facts = facts or Facts.of_session(session.get_session())
    folder = facts.trial_dir if facts.trial_dir and Path(facts.trial_dir).is_dir() else str(Path.cwd())
    storage = SimpleNamespace(trial_fs_path=folder, trial_dir_name=Path(folder).name, experiment_dir_name=facts.experiment_name)
    session._session = SimpleNamespace(  # type: ignore[assignment]
        report=lambda *_, **__: None, loaded_checkpoint=facts.loaded_checkpoint, world_size=1, world_rank=None, local_rank=0,
        local_world_size=1, node_rank=0, experiment_name=facts.experiment_name, trial_name=facts.trial_name,
        trial_id=facts.trial_id, run_id=facts.trial_id, trial_dir=folder, trial_resources=facts.trial_resources, storage=storage,
        accelerator=None, _get_or_create_inter_actor_queue=lambda: None,  # through which a trainer of Ray Train reports
    )  # fmt: skip


def _run_first_worker(trainer: Any) -> Any:
    """A trainer of Ray Train runs its function as it does under torchrun: in this process, the first of its workers."""
    from ray.train._internal import session

    if trainer.datasets:
        raise CaptureError("A TorchTrainer with datasets=... reads from Ray Data, which a dry run does not see. Use build=...")
    workers = trainer.scaling_config.num_workers  # of (fewest, most), the fewest: each holds a larger shard
    os.environ |= torchrun_variables(max(1, workers if isinstance(workers, int) else min(workers)))
    # workers are in no trial of Tune
    of_trial = session._session
    session._session = None
    try:
        return trainer._get_local_controller().run(trainer._get_train_func())
    finally:
        session._session = of_trial
