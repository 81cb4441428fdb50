"""Medians and sigmas of every shipped predictor, to hold a change of the code against that must not change a prediction.

    python benchmarks/golden.py --write FILE.json.gz             # every case; 4 minutes of one core
    python benchmarks/golden.py --check FILE.json.gz             # the same again, compared within 1e-6 in logarithms
    python benchmarks/golden.py --write tests/golden/predictions.json --every 12

About 300 graphs (training and inference of small networks and of timm's where it is installed, single operators, an ONNX file) on
a fixed CPU and eight GPUs. GuardNet predicts all of them: alone, in batches of several widths, and after it has learnt from a few
runs. The other predictors take every fourth graph on three devices. Memory is in log bytes, time in log seconds of a step.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import importlib.util
import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from perfguard import Device, Measurement, Observation, OpGraph, TensorSpec, Workload, load_predictor, resolve_device, trace
from perfguard.exceptions import PerfGuardError
from perfguard.onnx import graph_from_onnx
from perfguard.predictor import ENTRY_POINT_GROUP, Prediction, Predictor

TOLERANCE = 1e-6
"""Largest difference of two logarithms that counts as none."""
DEFAULT = "guardnet"
CPU = Device(
    id="cpu", name="Golden", kind="cpu", memory_bytes=2**35, bandwidth_bytes_per_s=2.5e10, peak_flops={"fp32": 2e11}, num_sms=4,
    boost_clock_hz=2.8e9, l2_bytes=2**22, tdp_w=0.0, architecture="x86_64", context_bytes=0, launch_overhead_s=5e-6,
    source="made up: the figures of a machine that is here today would not be here tomorrow",
)  # fmt: skip
GPUS = ("p4", "t4", "v100-sxm-32gb", "rtx3090", "rtx4090", "a100", "h100-sxm-80gb", "b200-sxm-180gb")
OTHERS_EVERY, OTHERS_ON = 4, ("cpu", "rtx3090", "a100")
"""Which graphs, and which devices, the predictors beside the default one are asked for."""
TIMM = (
    "resnet18", "resnet50", "mobilenetv3_small_100", "efficientnet_b0", "convnext_atto", "vit_tiny_patch16_224", "mixer_s32_224",
    "regnety_002", "swin_tiny_patch4_window7_224", "densenet121",
)  # fmt: skip
SETTINGS_A_NETWORK = 13
EXAMPLE_ONNX = Path(__file__).resolve().parents[1] / "examples" / "keras_cnn.onnx"

Row = list[float | None]
"""Log bytes, their sigma, log seconds, their sigma, GPU utilisation, SM activity; None: not predicted."""


class Case(NamedTuple):
    """A graph to be traced, and its name."""

    name: str
    trace_for: Callable[[Device], OpGraph]


class Convolutions(nn.Module):
    """Convolutions of several kinds, batch norm, pools; ``a`` and ``b`` are widths."""

    def __init__(self, a: int = 32, b: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, a, 3, padding=1), nn.BatchNorm2d(a), nn.ReLU(inplace=True))
        self.depthwise = nn.Conv2d(a, a, 5, padding=2, groups=a)
        self.wide = nn.Conv2d(a, b, 7, stride=2, dilation=2, padding=6)
        self.point = nn.Conv2d(a + b, b, 1)
        self.up = nn.ConvTranspose2d(b, a, 2, stride=2)
        self.head = nn.Linear(a, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = F.avg_pool2d(self.depthwise(x), 2)
        z = F.interpolate(self.wide(x), y.shape[2:])
        out: torch.Tensor = self.head(self.up(F.silu(self.point(torch.cat([y, z], 1)))).mean((2, 3)))
        return out


class Transformer(nn.Module):
    """Embeddings, encoder layers, a head over the vocabulary."""

    def __init__(self, width: int = 128, depth: int = 3, heads: int = 4, vocabulary: int = 1000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers(self.embedding(tokens)))[:, -1]
        return out


class Recurrent(nn.Module):
    """A recurrent network over vectors."""

    def __init__(self, kind: Callable[..., nn.Module], width: int) -> None:
        super().__init__()
        self.cells = kind(40, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.cells(x)[0][:, -1])
        return out


def perceptron(*widths: int) -> nn.Module:
    """Linear layers with GELU and dropout between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 10))


def timm_network(name: str) -> nn.Module:
    """One of timm's, without weights."""
    from perfguard_research.networks import timm_model

    model: nn.Module = timm_model(name)
    return model


Shape = Callable[[int], Any]
Network = tuple[Callable[[], nn.Module], Shape, tuple[int, ...]]
"""How to build it, the input of a batch, and batch sizes."""


def images(size: int) -> Shape:
    return lambda batch: (batch, 3, size, size)


def tokens(length: int) -> Shape:
    return lambda batch: TensorSpec((batch, length), "int64")


def vectors(*sizes: int) -> Shape:
    return lambda batch: (batch, *sizes)


def networks() -> dict[str, Network]:
    """By name."""
    found: dict[str, Network] = {
        "convolutions": (Convolutions, images(32), (4, 32, 128)),
        "convolutions wide": (lambda: Convolutions(96, 200), images(96), (2, 16, 48)),
        "transformer": (Transformer, tokens(64), (2, 16, 96)),
        "transformer wide": (lambda: Transformer(384, 4, 6, 8000), tokens(256), (1, 8, 24)),
        "lstm": (lambda: Recurrent(nn.LSTM, 96), vectors(24, 40), (8, 64)),
        "gru": (lambda: Recurrent(nn.GRU, 160), vectors(12, 40), (4, 256)),
        "perceptron": (lambda: perceptron(64, 256, 128), vectors(64), (16, 256, 4096)),
        "perceptron deep": (lambda: perceptron(784, *[1024] * 6), vectors(784), (32, 512)),
        "group norm": (
            lambda: nn.Sequential(
                nn.Conv2d(3, 48, 3), nn.GroupNorm(8, 48), nn.SiLU(), nn.Conv2d(48, 48, 3, groups=6), nn.AdaptiveAvgPool2d(1),
                nn.Flatten(), nn.Linear(48, 10),
            ),
            images(48),
            (3, 24),
        ),
        "one dimension": (
            lambda: nn.Sequential(
                nn.Conv1d(8, 64, 9, stride=2), nn.ReLU(), nn.MaxPool1d(4), nn.Conv1d(64, 128, 5), nn.ReLU(),
                nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(128, 10),
            ),
            vectors(8, 500),
            (4, 64),
        ),
    }  # fmt: skip
    if importlib.util.find_spec("timm") is not None:
        found |= {
            f"timm {name}": (functools.partial(timm_network, name), images(96 if "_224" not in name else 224), (2, 8, 32))
            for name in TIMM
        }
    return found


OPTIMIZERS: Mapping[str, Any] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-3),
    "adam one by one": functools.partial(torch.optim.Adam, lr=1e-3, foreach=False),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=1e-3),
}
PRECISIONS = ("fp32", "fp32", "amp-fp16", "amp-bf16", "fp16", "bf16")
SWITCHES: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {"cudnn_benchmark": True}, {"cudnn_benchmark": True}, {"layout": "nhwc"}, {"compiled": True}, {"accumulation": 2},
    {"ema": True}, {"ddp": True}, {"set_to_none": False},
)  # fmt: skip


def settings_of(name: str) -> list[dict[str, Any]]:
    """Modes, precisions, optimizers and switches for one network, drawn at random, always the same for a name."""
    generator = random.Random(f"golden {name}")
    found: list[dict[str, Any]] = []
    while len(found) < SETTINGS_A_NETWORK:
        mode = "train" if len(found) % 2 == 0 else "infer"
        fields = {"mode": mode, "precision": generator.choice(PRECISIONS), **generator.choice(SWITCHES)}
        if mode == "train":
            fields["optimizer"] = generator.choice(sorted(OPTIMIZERS))
        else:
            fields = {key: value for key, value in fields.items() if key not in ("accumulation", "ema", "ddp", "set_to_none")}
        fields["batch"] = generator.random()
        found.append(fields)
    return found


def traced(network: Network, fields: Mapping[str, Any], device: Device) -> OpGraph:
    """The step of one network in one setting."""
    build, inputs, batches = network
    batch = batches[int(fields["batch"] * len(batches))]
    with torch.device("meta"):
        model = build()
    of_workload = {key: value for key, value in fields.items() if key not in ("batch", "optimizer")}
    if fields["mode"] == "train":
        batch = max(1, batch // of_workload.get("accumulation", 1))
        targets = TensorSpec((batch,), "int64")
        of_workload |= {"targets": targets, "loss": F.cross_entropy, "optimizer": OPTIMIZERS[fields["optimizer"]]}
    return trace(Workload(model, inputs(batch), **of_workload), target=device)


def single_operators() -> Iterator[Case]:
    """Networks of one operator: tables of single operators are what some weights were fitted to."""
    modules: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "linear": (nn.Linear(1024, 512), (256, 1024)),
        "linear odd": (nn.Linear(77, 1001), (33, 77)),
        "convolution": (nn.Conv2d(64, 128, 3, padding=1, bias=False), (16, 64, 56, 56)),
        "convolution depthwise": (nn.Conv2d(96, 96, 7, padding=3, groups=96), (8, 96, 28, 28)),
        "softmax": (nn.Softmax(-1), (512, 1000)),
        "layer norm": (nn.LayerNorm(768), (2048, 768)),
        "relu": (nn.ReLU(), (64, 256, 32, 32)),
        "gelu": (nn.GELU(), (4096, 3072)),
        "pool": (nn.AvgPool2d(2), (32, 64, 64, 64)),
        "embedding": (nn.Embedding(30_000, 512), ()),
    }
    for (name, (module, shape)), precision in itertools.product(modules.items(), ("fp32", "fp16")):
        inputs: Any = shape or TensorSpec((64, 128), "int64")
        workload = Workload(module.to("meta"), inputs, mode="infer", precision=precision)  # type: ignore[arg-type]
        yield Case(f"operator {name} {precision}", functools.partial(_traced_for, workload))


def _traced_for(workload: Workload, device: Device) -> OpGraph:
    return trace(workload, target=device)


def cases() -> Iterator[Case]:
    """All graphs, in an order that does not change."""
    for name, network in networks().items():
        for number, fields in enumerate(settings_of(name)):
            yield Case(f"{name} {number}", functools.partial(traced, network, fields))
    yield from single_operators()
    for batch_size, precision in itertools.product((1, 8, 64), ("fp32", "fp16", "bf16")):
        yield Case(
            f"onnx {batch_size} {precision}",
            functools.partial(
                lambda batch_size, precision, device: graph_from_onnx(
                    EXAMPLE_ONNX, batch_size=batch_size, precision=precision, target=device
                ),
                batch_size,
                precision,
            ),
        )


def families() -> Iterator[tuple[str, Callable[[Device], list[OpGraph]]]]:
    """Graphs of one form and several widths."""
    widths = ((8, 16), (5, 33), (24, 24), (64, 7), (96, 128), (16, 4))
    makers: dict[str, tuple[Callable[..., nn.Module], Any]] = {
        "convolutions": (Convolutions, (4, 3, 32, 32)),
        "perceptron": (lambda a, b: perceptron(20, a, b), (64, 20)),
    }
    settings: tuple[dict[str, Any], ...] = (
        {"mode": "infer"},
        {"mode": "infer", "cudnn_benchmark": True},
        {"mode": "infer", "precision": "amp-fp16"},
        {"mode": "train", "precision": "bf16"},
        {"mode": "train"},
    )

    def graphs_of(make: Callable[..., nn.Module], inputs: Any, fields: Mapping[str, Any], device: Device) -> list[OpGraph]:
        found = []
        for pair in widths:
            with torch.device("meta"):
                model = make(*pair)
            loss: dict[str, Any] = {"loss": lambda y: y.float().mean()} if fields["mode"] == "train" else {}
            found.append(trace(Workload(model, inputs, **fields, **loss), target=device))
        return found

    for (name, (make, inputs)), (number, fields) in itertools.product(makers.items(), enumerate(settings)):
        yield f"{name} {number}", functools.partial(graphs_of, make, inputs, fields)


def row_of(prediction: Prediction) -> Row:
    """What is compared of a prediction."""
    estimates = (prediction.peak_memory, prediction.step_time)
    found: Row = [part for estimate in estimates for part in (math.log(estimate.median), estimate.log_sigma)]
    return [None if value is None else round(value, 9) for value in [*found, prediction.gpu_util, prediction.sm_active]]


def runs_of(graphs: Sequence[OpGraph], device: Device, predictor: Predictor) -> list[Observation]:
    """Made-up runs: some ten percent beside the prediction, one of them out of memory."""
    found = []
    for number, graph in enumerate(graphs):
        said = predictor.predict(graph, device)
        factor = math.exp(0.15 + 0.1 * math.sin(3.0 * number))
        memory, step_s = int(said.peak_memory.median * factor), said.step_time.median * factor
        status: Any = "oom" if number == 3 else "ok"
        measurement = Measurement(status, device.id, device.name, memory, step_s, 100 * step_s, 100, "golden", "torch")
        found.append(Observation(graph, device, measurement))
    return found


def predicted(every: int) -> dict[str, Row]:
    """Every prediction by its name: predictor, device, how it was asked for, graph.

    PyTorch has one thread meanwhile: sums in another order differ in their last bits.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _predicted(every)
    finally:
        torch.set_num_threads(threads)


def _predicted(every: int) -> dict[str, Row]:
    devices = {"cpu": CPU} | {name: resolve_device(name) for name in GPUS}
    names = sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)} - {DEFAULT})
    default, others = load_predictor(DEFAULT), {name: load_predictor(name) for name in names}
    found: dict[str, Row] = {}
    learnt_from: dict[str, list[OpGraph]] = {"cpu": [], "a100": []}
    for at, case in enumerate(cases()):
        if at % every:
            continue
        of_kind: dict[str, OpGraph] = {}
        for name, device in devices.items():
            if device.kind not in of_kind:
                try:
                    of_kind[device.kind] = case.trace_for(device)
                except PerfGuardError as error:
                    found[f"no graph | {device.kind} | {case.name}"] = [float(len(type(error).__name__))]
                    break
            graph = of_kind[device.kind]
            found[f"{DEFAULT} | {name} | {case.name}"] = row_of(default.predict(graph, device))
            if name in learnt_from and at % (4 * every) == 0:
                learnt_from[name].append(graph)
            if at % (OTHERS_EVERY * every) == 0 and name in OTHERS_ON:
                for other, predictor in others.items():
                    found[f"{other} | {name} | {case.name}"] = row_of(predictor.predict(graph, device))
    for at, ((family, graphs_on), (name, device)) in enumerate(itertools.product(families(), devices.items())):
        if at % every == 0:
            for number, graph in enumerate(graphs_on(device)):
                found[f"{DEFAULT} in batches | {name} | {family} {number}"] = row_of(default.predict(graph, device))
    for name, graphs in learnt_from.items():
        for predictor_name, predictor in {DEFAULT: default, **others}.items():
            told, asked = graphs[:20:2], graphs[1:40:2]
            predictor.fine_tune(runs_of(told, devices[name], predictor))
            for number, graph in enumerate(asked[: 4 if predictor_name != DEFAULT else len(asked)]):
                row = row_of(predictor.predict(graph, devices[name]))
                found[f"{predictor_name} having learnt | {name} | {number}"] = row
    return found


def differences(expected: Mapping[str, Row], found: Mapping[str, Row]) -> list[tuple[float, str]]:
    """The largest difference of each prediction, largest first; infinite where one of them is missing or says nothing."""
    out = []
    for key in sorted({*expected, *found}):
        one, other = expected.get(key), found.get(key)
        worst = math.inf
        if one is not None and other is not None and len(one) == len(other):
            pairs = list(zip(one, other, strict=True))
            if all((a is None) == (b is None) for a, b in pairs):
                worst = max(abs(a - b) for a, b in pairs if a is not None and b is not None)
        out.append((worst, key))
    return sorted(out, reverse=True)


def write(path: Path, every: int, rows: Mapping[str, Row]) -> None:
    """One prediction a line, so that a difference can be read; gzipped where the name says so."""
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
    head = json.dumps({"every": every, "torch": torch.__version__.partition("+")[0]})
    text = f'{{\n"made_by": {head},\n"rows": {{\n{lines}\n}}\n}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())


def read(path: Path) -> dict[str, Any]:
    """What :func:`write` wrote: "made_by" and "rows"."""
    data = path.read_bytes()
    document: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return document


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check; the exit status is 1 if a prediction has changed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE", help="FILE.json or FILE.json.gz")
    action.add_argument("--check", type=Path, metavar="FILE")
    parser.add_argument("--every", type=int, default=1, help="take every n-th graph (default: 1; with --check: as the file)")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help=f"of logarithms (default: {TOLERANCE})")
    arguments = parser.parse_args(argv)
    if arguments.write is not None:
        rows = predicted(arguments.every)
        write(arguments.write, arguments.every, rows)
        print(f"{len(rows):,} predictions in {arguments.write} ({arguments.write.stat().st_size / 1e3:.0f} kB)")
        return 0
    expected = read(arguments.check)
    found = differences(expected["rows"], predicted(expected["made_by"]["every"]))
    changed = [(worst, key) for worst, key in found if worst > arguments.tolerance]
    print(f"{len(found):,} predictions, {len(changed):,} further than {arguments.tolerance:g} apart. The worst:")
    for worst, key in found[:10]:
        print(f"  {worst:.3g}  {key}")
    if changed and expected["made_by"]["torch"] != torch.__version__.partition("+")[0]:
        print(f"The file was made with torch {expected['made_by']['torch']}, here is {torch.__version__}.")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
