"""The part inside a trial: one line measures it and adds the measurement to its reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar, cast

from ray.tune import Trainable
from ray.tune.result import RESULT_DUPLICATE

from perfguard.devices import Device, cpu_name, visible_gpu
from perfguard.measure import Measurement, Run, status_of
from perfguard.pace import Pace

PREFIX = "perfguard/"
_ATTRIBUTE = "_perfguard_measurement"
T = TypeVar("T", bound=type[Trainable])


@contextmanager
def measure(device: Device | None = None) -> Iterator[Run]:
    """Measure a trial until the end of the block. Every ``tune.report`` in the block has the cost so far.

    The one line that a training function needs::

        def train(config):
            with perfguard_ray.measure():
                ...  # build the model, train, tune.report({"loss": loss}) as before

    Reports have ``perfguard/peak_memory_bytes``, ``perfguard/step_time_s``, ``perfguard/total_time_s``, ``perfguard/num_steps``
    and the method. Torch's ``optimizer.step()`` counts the steps. With another framework call ``run.step()`` after each one
    (``with perfguard_ray.measure() as run``). Reports after the block have the final numbers. A dict that the function returns
    is such a report. In a training function of Ray Train, this applies to ``ray.train.report``, and the numbers are those of the
    worker with rank 0.

    Outside Ray the block is measured too (``run.measurement``), but nothing is reported.

    Args:
        device: what the trial runs on. None: the GPU that Ray gave it, else the CPU. The report names the device that the
            trial really used.
    """
    # The rates of the CPU are not measured here: that would cost each new actor a quarter of a second.
    run = Run(device or visible_gpu() or cast(Device, _Cpu("cpu", cpu_name())))
    _carry_with_reports(run)
    run.start()
    try:
        yield run
    except BaseException as error:
        run.finish(status_of(error), note=f"{type(error).__name__}: {error}"[:200])
        _attach(run, error)
        raise
    run.finish()


def measured(trainable: T) -> T:
    """Decorate a class Trainable, so that it is measured. Its results have the values of :func:`measure`.

    The one line that a Trainable class needs::

        @perfguard_ray.measured
        class Train(tune.Trainable): ...
    """

    class Measured(trainable):  # type: ignore[misc, valid-type]
        def setup(self, config: dict[str, Any], **parameters: Any) -> None:
            self._perfguard_run = _new_run()
            super().setup(config, **parameters)

        def step(self) -> dict[str, Any]:
            try:
                result = super().step()
            except Exception as error:
                self._perfguard_run.finish(status_of(error), note=f"{type(error).__name__}: {error}"[:200])
                _attach(self._perfguard_run, error)
                raise
            return {**result, **metrics_of(self._perfguard_run)}

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            done = bool(super().reset_config(new_config))
            if done:
                self._perfguard_run.finish()
                self._perfguard_run = _new_run()
            return done

        def cleanup(self) -> None:
            self._perfguard_run.finish()
            super().cleanup()

    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        setattr(Measured, name, getattr(trainable, name))
    return cast(T, Measured)


class _Cpu(NamedTuple):
    """The part of a Device that a Run reads."""

    id: str
    name: str
    kind: str = "cpu"


def _new_run() -> Run:
    return Run(visible_gpu() or cast(Device, _Cpu("cpu", cpu_name()))).start()


def metrics_of(run: Run) -> dict[str, Any]:
    """The report that carries what ``run`` has cost so far; what was not measured is left out."""
    pace = Pace.of(run.step_durations_s)
    fields = asdict(run.so_far()) | ({} if pace is None else {"pace_mean_s": pace.mean_s, "pace_error_s": pace.error_s})
    return {f"{PREFIX}{name}": value for name, value in fields.items() if value is not None and name != "status"}


def report_in(result: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of :func:`metrics_of` in ``result``; empty if the trial does not measure itself."""
    return {key.removeprefix(PREFIX): value for key, value in result.items() if key.startswith(PREFIX)}


def measurement_in(error: BaseException | None) -> Measurement | None:
    """The measurement of a trial that failed with ``error``; None: it does not measure itself."""
    while error is not None:
        measurement = getattr(error, _ATTRIBUTE, None)
        if isinstance(measurement, Measurement):
            return measurement
        error = getattr(error, "cause", None) or error.__cause__
    return None


def _attach(run: Run, error: BaseException) -> None:
    """Let the error take the measurement to the driver: a trial that fails reports nothing more."""
    try:
        setattr(error, _ATTRIBUTE, run.measurement)
    except AttributeError:  # a class with slots
        pass


def _carry_with_reports(run: Run) -> None:
    """Let every report of the session in this process carry the measurements of ``run``, until another run takes over.

    A session has no public hook for that. Ray Tune's is replaced on the instance (Ray 2.7 to 2.60). Ray says of Ray Train's that
    it "can be patched if new user APIs behaviors is wanted" (v2/_internal/execution/train_fn_utils.py, since 2.48).
    """
    session = _session()
    if session is None:
        return
    plain: Callable[..., None] = getattr(session.report, "_perfguard_plain", session.report)

    trial_id = getattr(session, "trial_id", None)

    def report(metrics: dict[str, Any], *arguments: Any, **options: Any) -> None:
        is_ours = trial_id == getattr(session, "trial_id", None)  # an actor that is used again keeps its session
        extra = metrics_of(run) if is_ours and RESULT_DUPLICATE not in metrics else {}
        plain({**metrics, **extra}, *arguments, **options)

    report._perfguard_plain = plain  # type: ignore[attr-defined]
    session.report = report


def _session() -> Any:
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
