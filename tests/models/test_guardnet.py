"""GuardNet: its weights are checked, its predictions add up, and it learns from what was measured."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from perfguard.devices import Device, resolve_device
from perfguard.exceptions import PredictorError
from perfguard.graph import OpGraph, trace
from perfguard.measure import Measurement
from perfguard.predictor import Observation, Prediction
from perfguard.workload import TensorSpec, Workload
from perfguard_models import guardnet
from perfguard_models.guardnet import GuardNet
from tests.doubles import TOY_CPU as CPU

UNKNOWN = replace(resolve_device("a100"), id="made-up")


@pytest.fixture
def net() -> GuardNet:
    return guardnet.load()


def perceptron(*widths: int, batch: int = 64) -> OpGraph:
    with torch.device("meta"):
        layers = [layer for a, b in zip((32, *widths), widths, strict=False) for layer in (nn.Linear(a, b), nn.ReLU())]
        model = nn.Sequential(*layers, nn.Linear(widths[-1], 10))
    return trace(Workload(model, (batch, 32), TensorSpec((batch,), "int64"), F.cross_entropy), target="cpu")


EIGHT = [perceptron(64 * n, 32 * n) for n in range(1, 9)]
NINTH = perceptron(272, 200)


def measured(peak_memory_bytes: Any, step_time_s: Any, *, num_steps: int = 10, total_time_s: float = 1.0) -> Measurement:
    return Measurement(
        status="ok",
        device_id="any",
        device_name="Toy",
        peak_memory_bytes=peak_memory_bytes,
        step_time_s=step_time_s,
        total_time_s=total_time_s,
        num_steps=num_steps,
        method="double",
        framework="torch",
    )


def half_as_much_again(net: GuardNet, graphs: Sequence[OpGraph], device: Device) -> list[Observation]:
    """Runs that took 1.5 times what is predicted now."""
    predictions = [net.predict(graph, device) for graph in graphs]
    return [
        Observation(graph, device, measured(int(1.5 * p.peak_memory.median), 1.5 * p.step_time.median, num_steps=0))
        for graph, p in zip(graphs, predictions, strict=True)
    ]


# --- weights


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A copy of the shipped weights, without suffix."""
    for suffix in ("safetensors", "json"):
        (tmp_path / f"net.{suffix}").write_bytes((files("perfguard_models") / "weights" / f"step-time.{suffix}").read_bytes())
    return tmp_path / "net"


def rewrite_card(weights: Path, **changes: Any) -> None:
    path = weights.with_suffix(".json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite_tensors(weights: Path, data: bytes) -> None:
    """Other tensors, and a card that vouches for them."""
    weights.with_suffix(".safetensors").write_bytes(data)
    rewrite_card(weights, sha256=hashlib.sha256(data).hexdigest())


def wrong_shape(weights: Path) -> None:
    tensors = load_file(weights.with_suffix(".safetensors"))
    tensors["network.machine.kind"] = torch.zeros(2, 2)
    save_file(tensors, weights.with_suffix(".safetensors"))
    rewrite_tensors(weights, weights.with_suffix(".safetensors").read_bytes())


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda weights: weights.with_suffix(".safetensors").unlink(), "cannot be read: .*No such file"),
        (
            lambda weights: weights.with_suffix(".json").write_text("{"),
            "cannot be read: .*train them again with `perfguard train",
        ),
        (
            lambda weights: rewrite_card(weights, format=999),
            "another version of PerfGuard: .*format.*Train them again",
        ),
        (lambda weights: rewrite_card(weights, columns="0" * 16), "made for another version of PerfGuard: .*'columns'"),
        (lambda weights: rewrite_card(weights, predictor="x"), "no learner 'x', only memory-forest, step-time"),
        (lambda weights: rewrite_card(weights, sha256="0" * 64), "do not match the hash in their card"),
        (lambda weights: rewrite_tensors(weights, b"not a safetensors file"), "do not fit the predictor"),
        (wrong_shape, r"do not fit the predictor: (?s:.*)size mismatch for machine.kind"),
        (lambda weights: rewrite_card(weights, settings={"depth": 3}), "do not fit the predictor: TypeError.*hidden"),
    ],
)
def test_wrong_weights_are_refused_with_reason(weights: Path, spoil: Callable[[Path], Any], reason: str) -> None:
    spoil(weights)
    with pytest.raises(PredictorError, match=reason):
        guardnet.load(weights)


# --- predictions


@pytest.mark.parametrize("device", [CPU, UNKNOWN], ids=["trained on", "never seen"])
def test_a_prediction_adds_up(net: GuardNet, device: Device) -> None:
    prediction = net.predict(NINTH, device, steps=100)
    assert sum(prediction.time_by_kind_s.values()) == pytest.approx(prediction.step_time.median, rel=1e-9)
    assert sum(prediction.memory_parts_bytes.values()) == pytest.approx(prediction.peak_memory.median, rel=1e-9)
    assert prediction.total_time is not None
    assert prediction.total_time.median == pytest.approx(100 * prediction.step_time.median)
    assert prediction.total_time.log_sigma >= prediction.step_time.log_sigma
    assert (prediction.predictor, prediction.device_id) == (net.name, device.id)
    assert net.predict(NINTH, device).total_time is None


@pytest.mark.parametrize("benchmark", [False, True])
def test_on_cpu_there_is_no_driver_and_no_cudnn(net: GuardNet, benchmark: bool) -> None:
    for graph in (on_a_gpu("fp32", "train", benchmark=benchmark), perceptron(64)):
        prediction = net.predict(graph, CPU)
        assert 0.9 < prediction.peak_memory.median / graph.peak_live_bytes < 4
        assert (prediction.gpu_util, prediction.sm_active) == (None, None)


def test_compiled_training_on_cpu_is_predicted_as_eager(net: GuardNet) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    eager, compiled = (
        net.predict(trace(Workload(model, (32, 64), loss=lambda y: y.sum(), compiled=compiled), target="cpu"), CPU)
        for compiled in (False, True)
    )
    assert compiled.step_time.median == pytest.approx(eager.step_time.median)


def on_a_gpu(precision: Any, mode: Any, *, benchmark: bool, batch: int = 64) -> OpGraph:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    train = mode == "train"
    return trace(
        Workload(
            model,
            (batch, 3, 64, 64),
            TensorSpec((batch,), "int64") if train else None,
            F.cross_entropy if train else None,
            mode=mode,
            precision=precision,
            cudnn_benchmark=benchmark,
        )
    )


@pytest.mark.parametrize(
    ("gpu", "precision", "mode", "benchmark", "trained"),
    [
        ("rtx3090", "amp-fp16", "train", True, ("time",)),  # the step time was measured; of the memory, what fitted
        ("rtx3090", "amp-fp16", "train", False, ("memory", "time")),  # the replay was compared with such steps
        ("a100", "fp32", "train", True, ("memory",)),  # here it is the other way round
        ("t4", "fp32", "train", False, ("memory", "time")),
        ("b200", "amp-bf16", "infer", True, ()),
    ],
)
def test_memory_is_the_replay_without_benchmark_mode(
    net: GuardNet, gpu: str, precision: str, mode: str, benchmark: bool, trained: tuple[str, ...]
) -> None:
    device = resolve_device(gpu)
    graph = on_a_gpu(precision, mode, benchmark=benchmark)
    prediction = net.predict(graph, device)
    replay = graph.reserved_bytes(device) + device.context_bytes
    assert (prediction.peak_memory.median == pytest.approx(replay, rel=1e-3)) == (not benchmark)
    assert prediction.trained_quantities == trained
    assert prediction.trained_on_device == (trained == ("memory", "time"))
    assert sum(prediction.time_by_kind_s.values()) == pytest.approx(prediction.step_time.median, rel=1e-3)


T4, EPYC = resolve_device("t4"), replace(CPU, name="AMD EPYC")


@pytest.mark.parametrize(("device", "other"), [(T4, replace(T4, id="made-up")), (EPYC, CPU)], ids=["gpu", "cpu"])
def test_device_that_no_table_had_is_less_sure(net: GuardNet, device: Device, other: Device) -> None:
    graph = on_a_gpu("fp32", "train", benchmark=False)
    seen, new = net.predict(graph, device), net.predict(graph, other)
    assert seen.trained_on_device
    assert not new.trained_on_device
    assert new.step_time.log_sigma >= seen.step_time.log_sigma


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("gpu", ["rtx3090", "a100", "h100"])
def test_both_half_precisions_take_about_as_long(net: GuardNet, mode: str, gpu: str) -> None:
    """BROKEN law: they take the same time. In benchmark mode, no training row of an RTX 3090 is in bfloat16."""
    device = resolve_device(gpu)
    for pair in (("amp-fp16", "amp-bf16"), ("fp16", "bf16")):
        one, other = (net.predict(on_a_gpu(precision, mode, benchmark=True), device).step_time.median for precision in pair)
        assert other == pytest.approx(one, rel=0.45 if (gpu, mode) == ("rtx3090", "train") else 0.3)


@pytest.mark.parametrize("precision", ["fp32", "amp-fp16", "amp-bf16"])
@pytest.mark.parametrize("gpu", ["a100", "h100", "b200", "t4"])
def test_it_is_never_less_sure_of_a_time_than_physics(net: GuardNet, precision: Any, gpu: str) -> None:
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    workload = Workload(nn.TransformerEncoder(layer, 2), (8, 64, 256), loss=lambda out: out.float().sum(), precision=precision)
    assert net.predict(trace(workload, target=resolve_device(gpu)), resolve_device(gpu)).step_time.log_sigma < 0.75


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_a_default_device_set_before_the_import_changes_nothing(device: str) -> None:
    # The module of the weights is imported at the first prediction: in a script that says torch.set_default_device("cuda").
    code = f"""
import torch
from torch import nn
from perfguard import Workload, predict
torch.set_default_device("{device}")
under = predict(Workload(nn.Linear(8, 8, device="meta"), (4, 8), mode="infer"), gpu="a100").step_time.median
assert not torch.cuda.is_initialized()
torch.set_default_device("cpu")
print(under, predict(Workload(nn.Linear(8, 8), (4, 8), mode="infer"), gpu="a100").step_time.median)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    under, after = done.stdout.split()
    assert under == after


def test_a_device_is_trained_for_the_quantities_that_were_learnt(net: GuardNet) -> None:
    device = replace(resolve_device("k80"), id="unknown-card")
    assert net.predict(NINTH, device).trained_quantities == ()
    net.fine_tune([Observation(NINTH, device, replace(measured(2**30, 1.0, num_steps=0), step_time_s=None))])
    assert net.predict(NINTH, device).trained_quantities == ("memory",)
    assert not net.predict(NINTH, device).trained_on_device


def test_a_pickled_net_predicts_the_same(net: GuardNet) -> None:
    net.fine_tune(half_as_much_again(net, EIGHT, CPU))
    assert pickle.loads(pickle.dumps(net)).predict(NINTH, CPU, steps=3) == net.predict(NINTH, CPU, steps=3)


# --- learning


def errors(prediction: Prediction, truth: Prediction) -> list[float]:
    """How far ``prediction`` is from 1.5 times ``truth``, as logarithms: memory, step time."""
    pairs = ((prediction.peak_memory, truth.peak_memory), (prediction.step_time, truth.step_time))
    return [abs(math.log(found.median / (1.5 * before.median))) for found, before in pairs]


@pytest.mark.parametrize(("device", "left"), [(CPU, 0.7), (UNKNOWN, 0.2)], ids=["trained on", "never seen"])
def test_fine_tune_on_eight_runs_improves_a_ninth(net: GuardNet, device: Device, left: float) -> None:
    before = net.predict(NINTH, device)
    net.fine_tune(half_as_much_again(net, EIGHT, device))
    after = net.predict(NINTH, device)
    assert after.trained_on_device
    assert all(new < left * math.log(1.5) for new in errors(after, before))
    if device is UNKNOWN:
        assert after.peak_memory.log_sigma < before.peak_memory.log_sigma
        assert after.step_time.log_sigma < before.step_time.log_sigma


def test_fine_tune_replaces_only_its_device(net: GuardNet) -> None:
    observations = half_as_much_again(net, EIGHT, CPU)
    net.fine_tune(observations)
    once = net.predict(NINTH, CPU)
    net.fine_tune(observations)
    assert net.predict(NINTH, CPU) == once
    net.fine_tune(half_as_much_again(net, EIGHT, UNKNOWN))
    assert net.predict(NINTH, CPU) == once


@pytest.mark.parametrize(
    "measurement",
    [
        measured(None, None),
        measured(0, math.nan),
        measured(-1, -1.0),
        measured(None, math.inf),
        measured(None, 0.0),
        measured(None, None, total_time_s=math.nan),
    ],
)
def test_what_was_not_measured_teaches_nothing(net: GuardNet, measurement: Measurement) -> None:
    before = net.predict(NINTH, CPU, steps=10)
    net.fine_tune([Observation(NINTH, CPU, measurement)])
    assert net.predict(NINTH, CPU, steps=10) == before


def test_fine_tune_learns_time_without_memory(net: GuardNet) -> None:
    before = net.predict(NINTH, CPU)
    net.fine_tune([Observation(graph, CPU, measured(None, 1.0)) for graph in EIGHT])
    after = net.predict(NINTH, CPU)
    assert after.peak_memory == before.peak_memory
    assert after.step_time.median > before.step_time.median


def test_what_trials_take_beyond_their_steps_is_learnt(net: GuardNet) -> None:
    step_time_s = net.predict(NINTH, CPU).step_time.median
    twice = measured(None, step_time_s, num_steps=100, total_time_s=200 * step_time_s)
    net.fine_tune([Observation(NINTH, CPU, twice)] * 20)
    prediction = net.predict(NINTH, CPU, steps=50)
    assert prediction.total_time is not None
    assert 1.8 < prediction.total_time.median / (50 * prediction.step_time.median) < 2.0


def test_suspended_trial_does_not_stretch_the_next(net: GuardNet) -> None:
    """Eight hours of a laptop's sleep in a trial of a second would break every time budget, and nothing would run again."""
    step_time_s = net.predict(NINTH, CPU).step_time.median
    asleep = measured(None, step_time_s, num_steps=100, total_time_s=8 * 3600.0)
    net.fine_tune([Observation(NINTH, CPU, asleep)])
    prediction = net.predict(NINTH, CPU, steps=50)
    assert prediction.total_time is not None
    assert prediction.total_time.median < 1.5 * 50 * prediction.step_time.median


def test_power_is_learnt_from_the_energy_counter(net: GuardNet) -> None:
    device = resolve_device("a100")
    assert net.predict(NINTH, device).energy is None
    observations = [
        replace(row, measurement=replace(row.measurement, energy_j=watts * row.measurement.total_time_s))
        for row, watts in zip(half_as_much_again(net, EIGHT, device), [190, 210, 200, 195, 205, 2e4, 200, math.nan], strict=True)
    ]
    net.fine_tune(observations)
    prediction = net.predict(NINTH, device)
    assert prediction.energy is not None
    assert prediction.energy.median == pytest.approx(200 * prediction.step_time.median, rel=0.03)
    assert prediction.step_time.log_sigma < prediction.energy.log_sigma < prediction.step_time.log_sigma + 0.2
    net.fine_tune(half_as_much_again(net, EIGHT, device))
    assert net.predict(NINTH, device).energy is None


def ran_out(graph: OpGraph, at_least_bytes: float) -> Observation:
    measurement = Measurement("oom", CPU.id, CPU.name, int(at_least_bytes), None, 1.0, 0, "made up", "torch")
    return Observation(graph, CPU, measurement)


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("gpu", ["cpu", "a100"])
@pytest.mark.parametrize("factor", [1.05, 1.5, 10.0])
def test_oom_step_stays_risky_though_others_fit(net: GuardNet, times: int, gpu: str, factor: float) -> None:
    device = CPU if gpu == "cpu" else resolve_device(gpu)
    predicted = net.predict(NINTH, device).peak_memory.median
    others = [Observation(graph, device, measured(net.predict(graph, device).peak_memory.median, 1e-3)) for graph in EIGHT]
    failed = replace(ran_out(NINTH, factor * predicted), device=device)
    fitting = Observation(NINTH, device, measured(predicted, 1e-3))
    for rows in (others, [*others, fitting]):
        net.fine_tune([*rows, *[failed] * times])
        assert net.predict(NINTH, device).peak_memory.p_exceeds(factor * predicted) > 0.7
    net.fine_tune([*others, *[failed] * times, fitting])
    assert net.predict(NINTH, device).peak_memory.p_exceeds(factor * predicted) < 0.5


def test_oom_at_nearly_all_memory_stays_risky(net: GuardNet) -> None:
    """A step that ran out of 97% of a GPU is not said to fit into all of it."""
    gpu, sure = resolve_device("a100"), on_a_gpu("fp32", "train", benchmark=True, batch=4096)
    before = net.predict(sure, gpu).peak_memory
    assert before.log_sigma < 0.05
    rows = [Observation(graph, gpu, measured(net.predict(graph, gpu).peak_memory.median, 1e-3)) for graph in EIGHT]
    net.fine_tune([*rows, *[replace(ran_out(sure, 0.97 * gpu.memory_bytes), device=gpu)] * 3])
    assert net.predict(sure, gpu).p_oom(gpu.memory_bytes) > 0.7


def test_what_is_known_of_a_graph_goes_with_it(net: GuardNet) -> None:
    # It is 100 KiB for 500 operators, and a study has thousands of structures.
    gc.collect()
    before = len(net._known)
    for width in range(1000, 1020):
        net.predict(perceptron(width, width), CPU)
    gc.collect()
    assert len(net._known) <= before


def test_bound_below_known_need_teaches_nothing(net: GuardNet) -> None:
    """A failure below the known need means that others were on the card, too."""
    gpu = resolve_device("a100")
    rows = half_as_much_again(net, EIGHT, gpu)
    net.fine_tune(rows)
    before = net.predict(EIGHT[0], gpu).peak_memory
    failed = replace(ran_out(EIGHT[0], 0.9 * before.median), device=gpu)  # others were on the card, too
    net.fine_tune([*rows, failed])
    after = net.predict(EIGHT[0], gpu).peak_memory
    assert after.median == pytest.approx(before.median, rel=0.01)
    assert after.log_sigma == pytest.approx(before.log_sigma, rel=0.2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_default_dtype_changes_nothing(net: GuardNet, weights: Path, dtype: torch.dtype) -> None:
    devices = CPU, resolve_device("a100")
    observations = half_as_much_again(net, EIGHT, CPU)
    net.fine_tune(observations)
    expected = [net.predict(NINTH, device) for device in devices]
    torch.set_default_dtype(dtype)
    try:
        other = guardnet.load(weights)
        other.fine_tune(observations)
        found = [other.predict(NINTH, device) for device in devices]
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == expected


def test_repeated_step_is_sure_of_itself_only(net: GuardNet) -> None:
    """The same network with cuDNN's benchmark switched off remains less sure."""
    device = resolve_device("a100")
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    off, on = (
        trace(Workload(model, (64, 3, 64, 64), TensorSpec((64,), "int64"), F.cross_entropy, cudnn_benchmark=flag))
        for flag in (False, True)
    )
    said = net.predict(on, device).step_time.median
    net.fine_tune([Observation(on, device, measured(None, 0.7 * said))] * 10)
    again, other = net.predict(on, device).step_time, net.predict(off, device).step_time
    assert again.median == pytest.approx(0.7 * said, rel=0.02)
    assert again.log_sigma >= 0.01
    assert other.log_sigma > 2 * again.log_sigma


def test_tiny_trials_on_a_cpu_say_nothing_of_networks_a_thousand_times_as_large(net: GuardNet) -> None:
    """Each grew by 3 to 9 MiB that no layer explains. In the logarithm that is a factor of 50."""
    tiny, large = [perceptron(8 + n) for n in range(8)], perceptron(4096, 4096)
    before = net.predict(large, CPU).peak_memory
    grown = [6.2, 9.2, 9.2, 6.2, 3.3, 3.3, 6.2, 6.2]
    net.fine_tune([Observation(graph, CPU, measured(int(mib * 2**20), 1e-4)) for graph, mib in zip(tiny, grown, strict=True)])
    after = net.predict(large, CPU).peak_memory
    assert after.median / before.median < 1.1
    assert after.log_sigma < 1.1 * before.log_sigma
    assert net.predict(perceptron(20), CPU).peak_memory.median == pytest.approx(6.2 * 2**20, rel=0.3)
