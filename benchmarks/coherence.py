"""Laws that predictions of GuardNet should keep, on random small networks and all cards of the catalog.

    python benchmarks/coherence.py --networks 40

A law says which of two predictions is the larger one, whatever the truth is: a card that is better in every figure is not slower,
for instance. The table shows how often the shipped weights break each law, and by how much. `tests/models/test_coherence.py`
keeps bounds on a few of the same networks.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from _record import parser_of, show
from rich.progress import track
from torch import nn

from perfguard import OpGraph, Workload, trace
from perfguard.devices import Device, catalog
from perfguard.graph.kernels import Target, target_of
from perfguard_models import guardnet

CARDS = list(catalog().values())
RECURRENT = {"lstm": nn.LSTM, "gru": nn.GRU}
PLAIN = ("convolutional", "transformer", "perceptron")
PRECISIONS = ("fp32", "tf32", "no-tf32", "amp-bf16", "amp-fp16")
SEGMENT_BYTES = 20 * 2**20
"""PyTorch's allocator reserves small segments of 2 MiB and large ones of 20 MiB; another order of allocations moves one."""
FIVE_PERCENT, ROUNDING = math.log(1.05), 1e-4
_EXAMPLES = {target_of(card): card for card in CARDS}
_COLUMNS = ("law", "pairs", "broken", "broken by more than 5%", "worst")


@functools.cache
def net() -> guardnet.GuardNet:
    """The shipped weights."""
    return guardnet.load()


class Recurrent(nn.Module):
    """Recurrent layers and a head."""

    def __init__(self, kind: str, width: int, depth: int) -> None:
        super().__init__()
        self.layers, self.head = RECURRENT[kind](width, width, depth, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The class of each sequence."""
        head: torch.Tensor = self.head(self.layers(x)[0][:, -1])
        return head


@dataclass(frozen=True)
class Network:
    """A small random network and how it runs."""

    kind: str
    width: int
    depth: int
    batch: int
    length: int
    """Pixels along an image, or tokens."""
    precision: str
    """As Workload has it, or "tf32" or "no-tf32"."""
    mode: Any
    benchmark: bool
    more_operators: int = 0

    @property
    def model(self) -> nn.Module:
        """The network itself."""
        width, more = self.width, [nn.Sigmoid() for _ in range(self.more_operators)]
        if self.kind in RECURRENT:
            return Recurrent(self.kind, width, self.depth)
        if self.kind == "transformer":
            layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
            return nn.Sequential(
                nn.Linear(32, width), nn.TransformerEncoder(layer, self.depth, enable_nested_tensor=False), *more
            )
        if self.kind == "perceptron":
            hidden = [layer for _ in range(self.depth) for layer in (nn.ReLU(), nn.Linear(width, width))]
            return nn.Sequential(nn.Linear(32, width), *hidden, *more, nn.Linear(width, 10))
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
        for _ in range(self.depth):
            layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
        return nn.Sequential(*layers, *more, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))

    @functools.lru_cache(maxsize=64)  # noqa: B019  tracing is what takes the time, and networks are few
    def traced(self, target: Target) -> OpGraph:
        """Its graph on cards of one kind."""
        sample = {"transformer": (self.length, 32), "perceptron": (32,), "convolutional": (3, self.length, self.length)}
        tf32: Any = {"tf32": "on", "no-tf32": "off"}.get(self.precision)
        switches: dict[str, Any] = {"precision": self.precision} if tf32 is None else {"tf32": tf32}
        switches |= {"cudnn_benchmark": True} if self.benchmark else {}
        with torch.device("meta"):
            model = self.model
        shape = (self.batch, *sample.get(self.kind, (self.length, self.width)))
        workload = Workload(model, shape, loss=lambda y: y.float().mean(), mode=self.mode, **switches)
        return trace(workload, target=_EXAMPLES[target])

    def graph(self, device: Device) -> OpGraph:
        """Its graph on ``device``."""
        return self.traced(target_of(device))

    def costs(self, device: Device) -> tuple[float, float]:
        """Seconds of a step, and bytes."""
        prediction = net().predict(self.graph(device), device)
        return prediction.step_time.median, prediction.peak_memory.median


def figures(card: Device) -> npt.NDArray[np.float64]:
    """The figures of which more is better."""
    rates = [card.flops_per_s(arithmetic) for arithmetic in ("fp32", "tf32", "fp16", "bf16")]
    return np.array([card.bandwidth_bytes_per_s, *rates, card.num_sms, card.boost_clock_hz, card.l2_bytes])


def is_better(one: Device, other: Device) -> bool:
    """Whether ``one`` is as good as ``other`` in every figure."""
    figures_hold = bool((figures(one) >= figures(other)).all()) and one.memory_bytes >= other.memory_bytes
    return figures_hold and one.launch_overhead_s <= other.launch_overhead_s


def of_one_generation(one: Device, other: Device) -> bool:
    """Whether both are of one architecture."""
    return one.architecture == other.architecture


PAIRS = [(one, other) for one, other in itertools.permutations(CARDS, 2) if is_better(one, other)]
"""A card, and one that is not better in any figure."""
SAME_GENERATION = [pair for pair in PAIRS if of_one_generation(*pair)]
VARIANTS = [
    pair
    for pair in itertools.combinations(CARDS, 2)
    if pair[0].architecture == pair[1].architecture and pair[0].num_sms == pair[1].num_sms
]
"""Cards with one chip, or as good as one."""

Excess = Iterator[tuple[str, float]]
"""Laws, each with the logarithm by which a pair of predictions breaks it; 0 or less: it holds."""


def of_cards(network: Network) -> Excess:
    """Laws of one card and another."""
    log_s = {card.id: math.log(network.costs(card)[0]) for card in CARDS}
    which = " (recurrent)" if network.kind in RECURRENT else ""
    for better, worse in PAIRS:
        excess = log_s[better.id] - log_s[worse.id]
        yield f"a better card is not slower{which}", excess
        if of_one_generation(better, worse):
            yield f"a better card of the same generation is not slower{which}", excess
    for one, other in VARIANTS:
        apart = float(np.abs(np.log(figures(one) / figures(other))).max())
        yield "variants of a chip differ by no more than their figures", abs(log_s[one.id] - log_s[other.id]) - apart


def of_steps(network: Network) -> Excess:
    """Laws of one step and a larger one."""
    larger = {
        "twice the batch": replace(network, batch=2 * network.batch),
        "one more layer": replace(network, depth=network.depth + 1),
    }
    if network.kind in PLAIN:
        larger["one more operator"] = replace(network, more_operators=1)
    for card in CARDS:
        seconds, num_bytes = network.costs(card)
        for what, more in larger.items():
            more_s, more_bytes = more.costs(card)
            which = " (recurrent)" if network.kind in RECURRENT and what == "twice the batch" else ""
            yield f"time: {what} does not take less{which}", math.log(seconds / more_s)
            less = math.log(max(num_bytes - SEGMENT_BYTES, 1) / more_bytes)
            yield f"memory: {what} does not take less, but for a segment", less


def of_sequences(network: Network) -> Excess:
    """Laws of recurrent layers that wait for their time steps."""
    short = replace(network, width=64, batch=2, length=1024)
    long = replace(short, length=2048)
    for card in CARDS:
        ratio = long.costs(card)[0] / short.costs(card)[0]
        yield "time: twice the sequence takes 1.5 times as long (recurrent)", math.log(1.5 / ratio)


def of_arithmetic(network: Network) -> Excess:
    """Laws of one arithmetic and another, for large products."""
    large = replace(network, width=max(2048, 16 * network.width), batch=4096)
    for card in CARDS:
        if "tf32" in card.peak_flops:
            names = ("no-tf32", "tf32", "bf16", "amp-bf16")
            in_fp32, in_tf32, in_half, in_amp = (math.log(replace(large, precision=name).costs(card)[0]) for name in names)
            yield "products: TF32 is not slower than float32", in_tf32 - in_fp32
            yield "products: bfloat16 is not slower than float32", in_half - in_fp32
            yield "products: bfloat16 is not slower than TF32", in_half - in_tf32
            yield "the same under autocast, which casts what the product reads (no law)", in_amp - in_tf32


def drawn(number: int) -> Iterator[tuple[Network, Callable[[Network], Excess]]]:
    """Random networks, each with the laws that are for it."""
    draw = random.Random(0)
    for at in range(number):
        network = Network(
            kind=[*PLAIN, *RECURRENT][at % 5],
            width=2 ** draw.randint(4, 9),
            depth=draw.randint(1, 3),
            batch=2 ** draw.randint(0, 6),
            length=draw.choice([16, 32]),
            precision=draw.choice(PRECISIONS),
            mode=draw.choice(["train", "infer"]),
            benchmark=draw.random() < 0.5,
        )
        yield network, of_cards
        yield network, of_steps
        if network.kind in RECURRENT:
            yield network, of_sequences
        if network.kind == "perceptron":
            yield network, of_arithmetic


def main() -> None:
    """Show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--networks", type=int, default=40)
    arguments = parser.parse_args()
    found: defaultdict[str, list[float]] = defaultdict(list)
    for network, laws in track(list(drawn(arguments.networks)), transient=True):
        for law, excess in laws(network):
            found[law].append(excess)
    lines = []
    for law, values in found.items():
        by_pair = np.array(values)
        shares = [f"{np.mean(by_pair > least):.1%}" for least in (ROUNDING, FIVE_PERCENT)]
        lines.append([law, f"{len(by_pair):,}", *shares, f"{max(math.expm1(by_pair.max()), 0):.0%}"])
    show("coherence", _COLUMNS, lines, record=arguments.record)


if __name__ == "__main__":
    main()
