"""RealStep: one training step of a launched trial, recorded while it really runs, and held against the captured one.

What is compared is the backward pass. In it there is nothing of loaders, evaluations and metrics, which a dry run cuts short, and
it grows with the layers, their widths and the batch.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from perfguard.capture.recording import cut_step
from perfguard.graph.op import Op, Phase, StorageKind
from perfguard.graph.recorder import Recorder, operator_of, tensors_in
from perfguard.quantities import format_bytes

if TYPE_CHECKING:
    from perfguard.graph.opgraph import OpGraph
    from perfguard.workload import CapturedTrial

_NOUNS = {
    "conv_backward": "convolutions",
    "matmul": "matrix products",
    "attention": "attentions",
    "norm_backward": "normalizations",
    "embedding": "embeddings",
}


class Difference(NamedTuple):
    """What a trial really runs, where its dry run has shown another step."""

    captured: CapturedTrial
    in_words: str
    """How the real step differs."""
    graph: OpGraph
    """The real step."""


class RealStep(Recorder):
    """Records the second step of a trial, as a dry run does, and the third if the second is not as it was captured.

    A step that differs from the next one too depends on data or on chance, which says nothing. So two alike must differ from the
    captured one. Nothing is recorded where the two cannot be compared, and a failure of the recorder ends it in silence.

    Args:
        captured: what the dry run has seen.
        device_kind: "cuda" or "cpu". Tensors of other devices are not recorded.
        tolerance: share by which the bytes that the backward pass writes may differ. On a CPU, most steps agree to the byte.
    """

    _birth_of_unseen = -1

    def __init__(self, captured: CapturedTrial, device_kind: str, *, tolerance: float = 0.2) -> None:
        super().__init__([], is_cpu=device_kind == "cpu")
        self.captured = captured
        self._device_kind = device_kind
        self._tolerance = tolerance
        self._optimizer: Any = None
        self._expected = _backward(captured.graph.ops)
        self._steps: list[Counter[str]] = []
        self._marks = [0]
        self.difference: Difference | None = None
        """How the real steps differ from the captured one. None: they agree, or it is not known."""
        # One of two optimizers does not make a whole step. Where lengths vary or stages differ, no two steps need be alike.
        is_comparable = captured.num_optimizers == 1 and set(captured.phases) <= {"the evaluation", "an evaluation"}
        is_long = captured.steps is None or captured.steps >= 10  # the recorded step is slow, and the step time a median
        self._is_over = captured.graph.unmodelled != () or not is_comparable or not is_long

    def after_step(self, optimizer: Any) -> None:
        """Note the end of a step of ``optimizer``."""
        if self._is_over and self not in _get_current_dispatch_mode_stack():
            return
        try:
            self._is_over = self._is_over or not self._goes_on(optimizer)
        except Exception:
            self._is_over = True
        if self._is_over:
            self.close()

    def close(self) -> None:
        """Stop recording, unless a mode of the user's is above. Then it passes everything on."""
        self._is_over = True
        self._optimizer = None  # it has the model, and a recorder is freed by the garbage collector alone
        if _get_current_dispatch_mode_stack()[-1:] == [self]:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _goes_on(self, optimizer: Any) -> bool:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [("", parameter.grad) for parameter in parameters]
        if self._optimizer is None:
            self._optimizer = optimizer
            dynamo = sys.modules.get("torch._dynamo.utils")  # what is compiled would run in another way under a mode
            is_compiled = dynamo is not None and any(map(dynamo.counters.get, ("frames", "stats")))  # whole graphs make no frames
            is_elsewhere = len(self._own(parameters)) < len(parameters)
            if is_compiled or is_elsewhere or isinstance(optimizer, torch.optim.LBFGS) or _get_current_dispatch_mode_stack():
                return False
            self.adopt([("", parameter) for parameter in parameters], StorageKind.PARAMETER)
            self.adopt(gradients, StorageKind.GRADIENT)
            self.adopt([("", value) for value in tensors_in(list(optimizer.state.values()))], StorageKind.OPTIMIZER_STATE)
            self.__enter__()  # type: ignore[no-untyped-call]
            return True
        if optimizer is not self._optimizer:
            return False
        self.mark(gradients, StorageKind.GRADIENT)
        self._steps.append(_backward(self.ops[self._marks[-1] :]))
        self._marks.append(len(self.ops))
        if len(self._steps) < 2:
            return _differ(self._steps[0], self._expected, self._tolerance)
        if not _differ(self._steps[0], self._steps[1], 0.01):
            self.difference = Difference(self.captured, self._in_words(), self._second_step())
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            out = func(*args, **(kwargs or {}))
            if not self._is_over:
                try:
                    self._note(func, operator_of(func), args, kwargs or {}, out)
                except Exception:
                    self._is_over = True
        return out

    def _own(self, value: Any) -> list[torch.Tensor]:
        return [tensor for tensor in tensors_in(value) if tensor.device.type == self._device_kind]

    def _in_words(self) -> str:
        real = self._steps[0]
        dry = self._expected
        ran = [
            f"runs {real[kind]} {noun} ({dry[kind]} in the dry run)" for kind, noun in _NOUNS.items() if real[kind] != dry[kind]
        ]
        wrote = f"writes {format_bytes(real['bytes'])} ({format_bytes(dry['bytes'])} in the dry run)"
        return f"its backward pass {' and '.join([*ran, wrote])}"

    def _second_step(self) -> OpGraph:
        _, end, after = self._marks
        of_optimizer = range(1 + max(at for at, op in enumerate(self.ops[:end]) if op.phase is Phase.BACKWARD), end)
        ops = [op._replace(phase=Phase.OPTIMIZER) if at in of_optimizer else op for at, op in enumerate(self.ops)]
        lives = [life._replace(birth_phase=Phase.OPTIMIZER) if life.birth in of_optimizer else life for life in self.lives()]
        window, storages = cut_step(ops, lives, {}, 0, end, after)
        return replace(self.captured.graph, ops=window, storages=storages)


def _backward(ops: Sequence[Op]) -> Counter[str]:
    """The number of operators of each kind in the backward pass, and the "bytes" that they write."""
    counts = Counter(op.kind for op in ops if op.phase is Phase.BACKWARD)
    counts["bytes"] = sum(op.bytes_written for op in ops if op.phase is Phase.BACKWARD)
    return counts


def _differ(one: Counter[str], other: Counter[str], tolerance: float) -> bool:
    return abs(one["bytes"] - other["bytes"]) > tolerance * max(one["bytes"], other["bytes"])
