"""GuardNet is coherent with its shipped weights: laws over random small networks and the whole catalog.

Not all laws hold. A test of a law that the weights break says BROKEN, by how much and where, and keeps the bound that holds. The
figures are from 40 random networks on all cards (2026-11-23). Weights that are better should get tighter bounds.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from perfguard import OpGraph, Workload, trace
from perfguard.devices import Device, catalog, mig_instance, mig_profiles, mps_share
from perfguard.graph._target import Target, target_of
from perfguard_models import guardnet

CARDS = list(catalog().values())
EXAMPLES = {target_of(card): card for card in CARDS}
RECURRENT = {"lstm": nn.LSTM, "gru": nn.GRU}
FEW = settings(max_examples=6, derandomize=True, deadline=None)
"""The bounds of broken laws were measured. Other examples at each run would break them by chance."""
FIVE_PERCENT, ROUNDING = math.log(1.05), 1e-4
SEGMENT_BYTES = 20 * 2**20
"""PyTorch's allocator reserves small segments of 2 MiB and large ones of 20 MiB; another order of allocations moves one."""


@functools.cache
def net() -> guardnet.GuardNet:
    return guardnet.load()


class Recurrent(nn.Module):
    def __init__(self, kind: str, width: int, depth: int) -> None:
        super().__init__()
        self.layers, self.head = RECURRENT[kind](width, width, depth, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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
        sample = {"transformer": (self.length, 32), "perceptron": (32,), "convolutional": (3, self.length, self.length)}
        tf32: Any = {"tf32": "on", "no-tf32": "off"}.get(self.precision)
        switches: dict[str, Any] = {"precision": self.precision} if tf32 is None else {"tf32": tf32}
        switches |= {"cudnn_benchmark": True} if self.benchmark else {}
        with torch.device("meta"):
            model = self.model
        shape = (self.batch, *sample.get(self.kind, (self.length, self.width)))
        return trace(Workload(model, shape, loss=lambda y: y.float().mean(), mode=self.mode, **switches), target=EXAMPLES[target])

    def graph(self, device: Device) -> OpGraph:
        return self.traced(target_of(device))

    def costs(self, device: Device) -> tuple[float, float]:
        """Seconds of a step, and bytes."""
        prediction = net().predict(self.graph(device), device)
        return prediction.step_time.median, prediction.peak_memory.median


def networks(*kinds: str) -> st.SearchStrategy[Network]:
    return st.builds(
        Network,
        kind=st.sampled_from(kinds),
        width=st.integers(4, 9).map(lambda power: 2**power),
        depth=st.integers(1, 3),
        batch=st.integers(0, 6).map(lambda power: 2**power),
        length=st.sampled_from([16, 32]),
        precision=st.sampled_from(["fp32", "tf32", "no-tf32", "amp-bf16", "amp-fp16"]),
        mode=st.sampled_from(["train", "infer"]),
        benchmark=st.booleans(),
    )


PLAIN = networks("convolutional", "transformer", "perceptron")
ALL = networks("convolutional", "transformer", "perceptron", *RECURRENT)
cards = st.sampled_from(CARDS)


def figures(card: Device) -> npt.NDArray[np.float64]:
    rates = [card.flops_per_s(arithmetic) for arithmetic in ("fp32", "tf32", "fp16", "bf16")]
    return np.array([card.bandwidth_bytes_per_s, *rates, card.num_sms, card.boost_clock_hz, card.l2_bytes])


def is_better(one: Device, other: Device) -> bool:
    """Whether ``one`` is as good as ``other`` in every figure, both of one vendor."""
    figures_hold = bool((figures(one) >= figures(other)).all()) and one.memory_bytes >= other.memory_bytes
    return figures_hold and one.launch_overhead_s <= other.launch_overhead_s and one.is_amd == other.is_amd


PAIRS = [(one, other) for one, other in itertools.permutations(CARDS, 2) if is_better(one, other)]
SAME_GENERATION = [pair for pair in PAIRS if pair[0].architecture == pair[1].architecture and not pair[0].is_amd]
VARIANTS = [
    pair
    for pair in itertools.combinations(CARDS, 2)
    if pair[0].architecture == pair[1].architecture and pair[0].num_sms == pair[1].num_sms
]
"""Cards with one chip, or as good as one."""


# One card and another


@FEW
@given(PLAIN, st.lists(st.sampled_from(SAME_GENERATION), min_size=5, max_size=5))
def test_better_card_of_a_generation_is_hardly_slower(network: Network, pairs: list[tuple[Device, Device]]) -> None:
    """BROKEN law: never slower by more than 5%.

    Without recurrent layers and within a generation, 0.3% of pairs and networks are over 5%, the worst at 8.3% (a V100S after a
    TITAN V, an H200 after an H100). All of these steps wait for the host. The network gives cards with more bandwidth for
    their arithmetic a slower host (`usual_host`). All pairs of the catalog are in the next test.
    """
    for better, worse in pairs:
        assert network.costs(better)[0] <= 1.1 * network.costs(worse)[0]


@pytest.mark.slow
@settings(FEW, max_examples=2)
@given(st.lists(ALL, min_size=4, max_size=4))
def test_better_card_of_the_catalog_is_seldom_slower(some: list[Network]) -> None:
    """BROKEN law: never slower by more than 5%.

    5.7% of pairs and networks are over 5%: 3.9% without recurrent layers, the worst at 28% (small steps, a B200 after a TITAN
    RTX), and 10.5% with them, the worst at 76% (an LSTM, an A30 after a P100). One cause is the host, as above. The other is
    that the least time of a recurrent step is of no card, and the network multiplies it by a factor of the card.
    """
    place = {card.id: at for at, card in enumerate(CARDS)}
    slower = []
    for network in some:
        log_s = np.log([network.costs(card)[0] for card in CARDS])
        slower += [log_s[place[better.id]] - log_s[place[worse.id]] for better, worse in PAIRS]
    assert np.mean(np.array(slower) > FIVE_PERCENT) < 0.2
    assert max(slower) < math.log(2)


@FEW
@given(ALL, st.lists(st.sampled_from(VARIANTS), min_size=5, max_size=5))
def test_variants_of_a_chip_differ_by_no_more_than_their_figures(network: Network, pairs: list[tuple[Device, Device]]) -> None:
    """Holds within 5% for all 84 pairs."""
    for one, other in pairs:
        apart = np.abs(np.log(figures(one) / figures(other))).max()
        assert abs(math.log(network.costs(one)[0] / network.costs(other)[0])) <= apart + FIVE_PERCENT


@FEW
@given(ALL, st.sampled_from([card for card in CARDS if mig_profiles(card)]), st.sampled_from([0.1, 0.5, 0.9]))
def test_a_slice_is_never_faster_than_the_whole(network: Network, card: Device, share: float) -> None:
    """Holds, because GuardNet takes the card's time where it is longer. The network alone breaks it for 8% of slices, the worst
    by 39%."""
    graph = network.graph(card)
    whole = net().predict(graph, card).step_time.median
    for part in (mps_share(card, share), *(mig_instance(card, profile) for profile in mig_profiles(card))):
        assert net().predict(graph, part).step_time.median >= whole * (1 - ROUNDING)


# One step and a larger one


@FEW
@given(ALL, cards)
def test_more_batch_and_more_layers_never_cost_less(network: Network, card: Device) -> None:
    """Time holds for layers, and for batches without recurrent layers. BROKEN: with recurrent layers, twice the batch takes up to
    7.4% less (6% of cards and networks).

    Memory holds but for a segment of the allocator, 2 MiB for batches. BROKEN: with benchmark mode on, the trees for memory take
    off up to 20 MiB (3.5%) for a layer more.
    """
    seconds, num_bytes = network.costs(card)
    for larger in (replace(network, batch=2 * network.batch), replace(network, depth=network.depth + 1)):
        least = 0.9 if network.kind in RECURRENT and larger.depth == network.depth else 1 - ROUNDING
        larger_s, larger_bytes = larger.costs(card)
        assert larger_s >= least * seconds
        assert larger_bytes >= num_bytes - SEGMENT_BYTES


@FEW
@given(PLAIN, cards)
def test_one_more_operator_costs_its_bytes_and_no_less_time(network: Network, card: Device) -> None:
    """Memory grows by no more than the operator's bytes and a segment (5 MiB seen). It may fall by a segment (16 MiB seen).

    BROKEN: the time falls for 9% of cards and networks, over 5% for 2%, the worst by 18% (inference of a convolutional network
    with a Sigmoid more, on a GTX 1650).
    """
    more = replace(network, more_operators=1)
    made = sum(one.num_bytes for one in more.graph(card).storages) - sum(one.num_bytes for one in network.graph(card).storages)
    (seconds, num_bytes), (more_s, more_bytes) = network.costs(card), more.costs(card)
    assert -SEGMENT_BYTES <= more_bytes - num_bytes <= made + SEGMENT_BYTES
    assert more_s >= 0.8 * seconds


@FEW
@given(networks(*RECURRENT), cards, st.sampled_from([1024, 2048]))
def test_twice_the_sequence_takes_half_as_long_again(network: Network, card: Device, length: int) -> None:
    """Holds where latency is what takes the time: narrow layers, small batches, and sequences from 1,024 on. The least is
    1.49 from 512 to 1,024 steps and 1.26 below 64, because the start of a step takes as long."""
    small = replace(network, width=64, batch=2, length=length)
    assert replace(small, length=2 * length).costs(card)[0] >= 1.5 * small.costs(card)[0]


# One arithmetic and another

PRODUCTS = st.builds(
    Network,
    kind=st.just("perceptron"),
    width=st.sampled_from([2048, 4096, 8192]),
    depth=st.integers(2, 3),
    batch=st.sampled_from([4096, 8192]),
    length=st.just(1),
    precision=st.just("fp32"),
    mode=st.sampled_from(["train", "infer"]),
    benchmark=st.just(False),
)


@FEW
@given(PRODUCTS, st.sampled_from([card for card in CARDS if "tf32" in card.peak_flops]))
def test_lower_precision_is_not_slower_for_products(network: Network, card: Device) -> None:
    """BROKEN law: float32 ≥ TF32 ≥ half.

    TF32 takes up to 13% longer than float32 on GeForce cards, whose rates of both are equal; elsewhere it holds. Half precision
    is below float32 everywhere. It is up to 25% over TF32 on the fastest cards (H100, B200) with batches up to 2,048 or widths
    up to 2,048, where the casts take as long as the products.
    """
    in_fp32, in_tf32, in_half = (replace(network, precision=name).costs(card)[0] for name in ("no-tf32", "tf32", "amp-bf16"))
    has_equal_rates = card.flops_per_s("tf32") < 1.2 * card.flops_per_s("fp32")
    assert in_tf32 <= in_fp32 * (1.15 if has_equal_rates else 1 + ROUNDING)
    assert in_half <= in_fp32 * (1 + ROUNDING)
    assert in_half <= in_tf32 * (1.3 if network.width == 2048 else 1 + ROUNDING)
