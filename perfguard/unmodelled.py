"""What a graph and a prediction do not model: each has a code for programs beside its sentence for people.

The code stays when a sentence is written anew. docs/check.md shows all of them to users.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

OTHER = "other"
"""The code of what is not below, for instance of another predictor."""


@dataclass(frozen=True, slots=True)
class Unmodelled:
    """One thing that a graph or a prediction leaves out."""

    code: str
    sentence: str
    """For people. Of what is below, it has {} in the place of what differs from case to case."""

    def of(self, *parts: object) -> Unmodelled:
        """Return the same with ``parts`` in the places of its {}.

        Example:
            >>> str(LINK_ASSUMED.of("NVIDIA L4", 25))
            'the link of NVIDIA L4 is not known: 25 GB/s are assumed'
        """
        return dataclasses.replace(self, sentence=self.sentence.format(*parts))

    def __str__(self) -> str:
        return self.sentence


TRACED_AS_EAGER = Unmodelled(
    "compiled-as-eager", "torch.compile: traced as eager; fused kernels need less memory traffic and fewer launches"
)
PARTS_TRACED_AS_EAGER = Unmodelled("compiled-parts-as-eager", "torch.compile: compiled parts are predicted as eager: {}")
COMPILED_KERNELS = Unmodelled(
    "compiled-kernels", "torch.compile: operators merged into kernels as Inductor is expected to ({} kernels for {} operators)"
)
CPU_AUTOCAST = Unmodelled("cpu-autocast", "autocast on the CPU: traced with CUDA's lists of operators")
OWN_STEP_AUTOCAST = Unmodelled("own-step-autocast", "a step of your own: autocast is only where the step itself enters it")
RNN_WORKSPACE = Unmodelled("rnn-workspace", "recurrent layers: the workspace of cuDNN is an estimate")
OPAQUE_FUNCTIONS = Unmodelled("opaque-functions", "opaque functions: their bytes are counted, their arithmetic is not")
TRITON = Unmodelled("triton-kernels", "kernels of Triton: their bytes are counted, their arithmetic is not")
DATA_PARALLEL = Unmodelled("data-parallel", "DataParallel: judged as one module, with the whole batch on one GPU")
DDP_ALL_REDUCE = Unmodelled("ddp-all-reduce", "DDP: the buckets are counted, the time of the all-reduce is not")
HOST_OPTIMIZER = Unmodelled(
    "host-optimizer", "optimizer on the host: the time of its step and of the copies to it and back is not counted"
)
PAGED_STATES = Unmodelled(
    "paged-optimizer", "paged optimizer: its states may leave the GPU; their bytes and the time to move them are not counted"
)
LBFGS = Unmodelled("lbfgs", "LBFGS: its history and most of its closures depend on values, and are not counted")
KEPT = Unmodelled("kept-outputs", "training keeps outputs on the device: it is taken to go on so to the end of the epoch")
EVEN_CHOICES = Unmodelled("even-choices", "experts and other choices by index: tokens are assumed to be spread evenly")
GROUPED_PRODUCTS = Unmodelled("grouped-products", "grouped products of experts: tokens are assumed to be spread evenly")
HALF_CHOSEN = Unmodelled("half-chosen", "selections whose size depends on the data: half of the elements is assumed")
GENERATED = Unmodelled("generated-text", "text generated within a step: the time of its first tokens alone is counted")
NO_PROCESS_GROUP = Unmodelled(
    "no-process-group", "{} processes are stated, but no process group is made: what is judged is one process by itself"
)
NCCL_BUFFERS = Unmodelled("nccl-buffers", "rank {} of {}: NCCL's buffers beyond those of an all-reduce are not counted")
CPU_LINK_TIME = Unmodelled("cpu-link-time", "rank {} of {}: the time on the link is not counted")
NO_SHARDING = Unmodelled("no-sharding", "no model is wrapped or sharded: each process holds all of it")
FSDP_ONE_PART = Unmodelled(
    "fsdp-one-part", "FSDP wraps the model as one part: a rank holds all parameters at once while it computes"
)
NETWORK_ASSUMED = Unmodelled("network-assumed", "the network between the nodes is not stated: {} for each GPU are assumed")
LINK_ASSUMED = Unmodelled("link-assumed", "the link of {} is not known: {} GB/s are assumed")
ONNX_OPAQUE = Unmodelled(
    "onnx-opaque-operators",
    "opaque operators: their bytes are counted, their arithmetic is not, and intervals are wider for it: {}",
)
ONNX_UNKNOWN_SHAPES = Unmodelled("onnx-unknown-shapes", "{} operators whose output shape depends on the data, not counted: {}")
ONNX_QUANTISED = Unmodelled(
    "onnx-quantised", "quantised operators: bytes as stored, arithmetic at the rate of float32, each operator on its own"
)

GAPS = tuple(value for value in vars().values() if isinstance(value, Unmodelled))
"""All of them. A test holds that PerfGuard says no others."""
_BY_SENTENCE = {gap.sentence: gap for gap in GAPS}


def said_before(sentence: str) -> Unmodelled:
    """Return what a ``sentence`` of a graph says that was stored without codes. One with names and numbers in it is "other"."""
    return _BY_SENTENCE.get(sentence, Unmodelled(OTHER, sentence))


def notes_of_unmodelled(gaps: Iterable[Unmodelled]) -> list[str]:
    """Return a line for people for each of the ``gaps``, with its code: "not modelled [lbfgs]: LBFGS: ..."."""
    return [f"not modelled [{gap.code}]: {gap}" for gap in gaps]
