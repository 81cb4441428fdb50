"""What needs more memory than the budget by liveness alone is pruned: any size, no predictor, no error."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from perfguard import Device, Estimate, Guard, Prediction, Workload
from perfguard.devices import resolve_device
from perfguard.exceptions import BudgetWarning, BuildError, TooLargeError
from perfguard.graph import OpGraph, StorageKind, TraceCache, trace
from perfguard.physics import LeastMemory, scatter_of_readings
from perfguard.predictor import load_predictor
from perfguard.workload import build_workload
from tests.doubles import BARE_A100, TOY_CPU, ReplayPredictor

A100 = resolve_device("a100")


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


CONVOLUTIONS = on_meta(
    lambda: nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )
)
PERCEPTRON = on_meta(lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
TRANSFORMER = on_meta(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2))


class Attention(nn.Module):
    """Whose matrix of weights is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(64, 64, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query: torch.Tensor = self.query(x)
        return (query @ query.mT).softmax(-1) @ query


def workload(model: nn.Module, *shape: int, **options: Any) -> Workload:
    if options.get("mode") != "infer":
        options = {"loss": torch.mean, "optimizer": torch.optim.AdamW, **options}
    return Workload(model, shape, **options)


class Unasked(ReplayPredictor):
    """What is hopeless must not reach the predictor."""

    def predict(self, graph: OpGraph, device: Device, *, steps: int | None = None) -> Prediction:
        raise AssertionError("the predictor was asked")


def guard(**options: Any) -> Guard:
    return Guard(**{"gpu": A100, "predictor": Unasked(), "log": False, **options})


SHAPES: list[tuple[nn.Module, Callable[[int], tuple[int, ...]]]] = [
    (CONVOLUTIONS, lambda size: (size, 3, 32, 32)),
    (PERCEPTRON, lambda size: (size, 64)),
    (TRANSFORMER, lambda size: (size, 16, 64)),
    (TRANSFORMER, lambda size: (2, size, 64)),
    (Attention(), lambda size: (2, size, 64)),
]


@pytest.mark.parametrize("exponent", [9, 11, 14, 20])
@pytest.mark.parametrize("at", range(len(SHAPES)), ids=["convolutions", "perceptron", "transformer", "sequence", "attention"])
@pytest.mark.parametrize("gpu", [A100, TOY_CPU], ids=["gpu", "cpu"])
def test_no_size_is_too_large_for_a_verdict(at: int, exponent: int, gpu: Device) -> None:
    """A ResNet at batch 5.7 million was a KeyError, and launched."""
    model, shape = SHAPES[at]
    verdict = guard(gpu=gpu).check(workload(model, *shape(10**exponent), steps=100))
    assert verdict.action == "prune"
    assert verdict.reason.startswith("needs at least ")
    assert verdict.p_violation > 0.99
    prediction = verdict.prediction
    assert prediction is not None
    for estimate in (prediction.peak_memory, prediction.step_time, prediction.total_time):
        assert estimate is not None
        assert all(map(math.isfinite, (estimate.median, *estimate.interval())))
    assert 0 < verdict.margins["memory"] < math.inf


def test_the_reason_names_the_parts_and_the_budget() -> None:
    verdict = guard(memory_budget="38GiB").check(workload(CONVOLUTIONS, 5_700_000_000, 3, 32, 32))
    assert re.fullmatch(
        r"needs at least 1\.\d\d PiB \(saved activations \d+ TiB, .*, inputs 63\.7 TiB\), the budget is 38\.0 GiB", verdict.reason
    ), verdict.reason


def test_lower_bound_overrules_predictor_to_the_byte() -> None:
    """A predictor that contradicts physics is overruled."""
    example = workload(PERCEPTRON, 4096, 64)
    least = LeastMemory.of(trace(example, target=BARE_A100), BARE_A100).num_bytes
    optimist = ReplayPredictor(memory=Estimate(1.0, 0.01))
    too_little, just_enough = (
        guard(gpu=BARE_A100, memory_budget=f"{num_bytes}B", predictor=optimist).check(example) for num_bytes in (least - 1, least)
    )
    assert (too_little.action, just_enough.action) == ("prune", "launch")
    assert too_little.reason.startswith("needs at least ")
    assert too_little.p_violation >= 0.999
    # Near the budget searchers learn the border from the predictor's numbers; the bound's own estimate would be a step there.
    near = guard(gpu=BARE_A100, memory_budget=f"{least // 2}B", predictor=ReplayPredictor()).check(example)
    assert near.action == "prune"
    assert near.prediction is not None
    assert near.prediction.predictor == "replay-1"


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("gpu", ["a100", "rtx3090", "rtx4090", "v100-pcie-16gb", "cpu"])
def test_predictor_never_thinks_less_is_enough(gpu: str, mode: str) -> None:
    """Else the bound would prune what the predictor would launch: its median is above the bound, on every card, at every size."""
    guardnet, device, cache = load_predictor(), resolve_device(gpu), TraceCache()
    nets = [(CONVOLUTIONS, (3, 64, 64)), (PERCEPTRON, (64,)), (TRANSFORMER, (128, 64)), (Attention(), (256, 64))]
    for model, shape in nets:
        for batch in (2, 32, 512, 8192):
            for precision in ("fp32", "amp-bf16"):
                graph = cache.trace(workload(model, batch, *shape, mode=mode, precision=precision), target=device)
                memory = guardnet.predict(graph, device).peak_memory
                least = LeastMemory.of(graph, device).num_bytes
                assert memory.p_exceeds(least) >= 0.5, (batch, precision, memory.median / least)


def test_least_bytes_of_compiled_count_what_lasts() -> None:
    """A claim that a step needs at least so much must hold under torch.compile, too."""
    plain, compiled = (trace(workload(PERCEPTRON, 10_000, 64, compiled=on, retain="nothing")) for on in (False, True))
    assert sum(plain.least_bytes_by_kind.values()) == plain.peak_live_bytes
    parameters = sum(parameter.numel() * 4 for parameter in PERCEPTRON.parameters())
    inputs = 10_000 * 64 * 4
    lasting = compiled.least_bytes_by_kind
    assert lasting[StorageKind.PARAMETER] == lasting[StorageKind.GRADIENT] == parameters
    assert lasting[StorageKind.INPUT] == inputs
    assert 2 * parameters <= lasting[StorageKind.OPTIMIZER_STATE] < 2 * parameters + 100
    assert set(lasting).isdisjoint({StorageKind.ACTIVATION, StorageKind.TEMPORARY})
    assert sum(lasting.values()) < plain.peak_live_bytes


def test_hopeless_step_is_repaired_by_smaller_batch() -> None:
    example = workload(PERCEPTRON, 960_000, 64)
    peak = trace(example, target=BARE_A100).peak_live_bytes
    judge = Guard(BARE_A100, memory_budget=f"{peak // 8}B", predictor=ReplayPredictor(), log=False, on_violation="repair")
    verdict = judge.check(example)
    assert verdict.action == "repair"
    assert verdict.reason.startswith("needs ")
    micro = verdict.repair.micro_batch_size
    assert micro is not None
    assert micro * verdict.repair.accumulation == 960_000


def test_batch_of_a_trillion_is_pruned_fast() -> None:
    """Its divisors are not searched one by one."""
    judge = Guard(BARE_A100, predictor=ReplayPredictor(), log=False, on_violation="repair")
    verdict = judge.check(workload(PERCEPTRON, 10**12, 64))
    assert verdict.action == "prune"
    assert verdict.reason.endswith("no remedy of accumulation helps")


def test_the_largest_batch_is_found_below_any_ceiling() -> None:
    judge = Guard(BARE_A100, memory_budget="1GiB", predictor=ReplayPredictor(), log=False)
    example = workload(PERCEPTRON, 32, 64)
    assert judge.max_batch_size(example, at_most=10**18) == judge.max_batch_size(example) > 1000


def test_a_warning_launches_the_hopeless_all_the_same() -> None:
    """Whoever asks for warnings gets a warning, even for what cannot be built."""
    judge = guard(on_violation="warn")
    for build in (lambda _: workload(PERCEPTRON, 10**12, 64), lambda _: workload(nn.Linear(10**20, 2), 1, 1)):
        with pytest.warns(BudgetWarning, match="would prune: needs at least"):
            assert judge.decide(judge.describe(build, {})).verdict.action == "launch"


def test_a_tensor_that_cannot_be_described_is_named() -> None:
    with pytest.raises(TooLargeError, match=r"does not fit into any memory: .*sizes=\[1000000000000000000, 64\]") as caught:
        trace(workload(PERCEPTRON, 10**18, 64))
    assert caught.value.num_bytes == 2**63
    twin = pickle.loads(pickle.dumps(caught.value))  # Ray sends it home
    assert (str(twin), twin.num_bytes) == (str(caught.value), caught.value.num_bytes)


def test_no_interval_of_a_resident_set_is_narrower_than_equal_readings_scatter() -> None:
    assert scatter_of_readings(5e6, "cuda") == 0.0
    assert scatter_of_readings(5e6, "cpu") == scatter_of_readings(20e6, "cpu") == 0.05
    assert scatter_of_readings(1e9, "cpu") < 0.005, "large blocks are mapped one by one"
    graph = trace(workload(PERCEPTRON, 32, 64))
    on_cpu, on_gpu = (Guard(device, predictor=ReplayPredictor(), log=False).predict(graph) for device in (TOY_CPU, BARE_A100))
    assert on_gpu.peak_memory.log_sigma == 0.01
    assert on_cpu.peak_memory.log_sigma == 0.05
    assert on_cpu.widening["memory"] == pytest.approx(5.0), "so what the predictor said is known"


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: torch.empty(2**40, 2**40), TooLargeError),
        (lambda: torch.zeros(10**20), TooLargeError),
        (lambda: torch.empty(2**46, device="cpu"), TooLargeError),  # on the host, whatever device is the default
        (lambda: torch.manual_seed(10**30), BuildError),  # large, but no size
        (lambda: torch.zeros(2, 3).view(7), BuildError),
    ],
)
def test_only_a_size_is_hopeless(make: Callable[[], object], error: type[Exception]) -> None:
    """What fails for another reason is no evidence of its size."""

    def build(params: Mapping[str, Any]) -> Workload:
        make()
        return workload(PERCEPTRON, 2, 64)

    with pytest.raises(error):
        build_workload(build, {})
