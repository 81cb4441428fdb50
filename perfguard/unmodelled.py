"""What a prediction does not model: a code for each sentence.

A graph and a prediction say what they leave out in sentences for people, with names and numbers in them. A program asks for the
code, which stays when a sentence is written anew. The table below has them all; docs/check.md shows it to users.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

OTHER = "other"
"""The code of a sentence that is not in the table, for instance of another predictor."""


class Gap(NamedTuple):
    """One thing that is not modelled."""

    code: str
    sentence: str
    """The sentence, with {} in the place of what differs from case to case."""


GAPS = (
    Gap("compiled-as-eager", "torch.compile: traced as eager; fused kernels need less memory traffic and fewer launches"),
    Gap("compiled-parts-as-eager", "torch.compile: compiled parts are predicted as eager: {}"),
    Gap(
        "compiled-kernels",
        "torch.compile: operators merged into kernels as Inductor is expected to ({} kernels for {} operators)",
    ),
    Gap("cpu-autocast", "autocast on the CPU: traced with CUDA's lists of operators"),
    Gap("own-step-autocast", "a step of your own: autocast is only where the step itself enters it"),
    Gap("rnn-workspace", "recurrent layers: the workspace of cuDNN is an estimate"),
    Gap("opaque-functions", "opaque functions: their bytes are counted, their arithmetic is not"),
    Gap("triton-kernels", "kernels of Triton: their bytes are counted, their arithmetic is not"),
    Gap("data-parallel", "DataParallel: judged as one module, with the whole batch on one GPU"),
    Gap("ddp-all-reduce", "DDP: the buckets are counted, the time of the all-reduce is not"),
    Gap("host-optimizer", "optimizer on the host: the time of its step and of the copies to it and back is not counted"),
    Gap(
        "paged-optimizer",
        "paged optimizer: its states may leave the GPU; their bytes and the time to move them are not counted",
    ),
    Gap("lbfgs", "LBFGS: its history and most of its closures depend on values, and are not counted"),
    Gap("kept-outputs", "training keeps outputs on the device: it is taken to go on so to the end of the epoch"),
    Gap("even-choices", "experts and other choices by index: tokens are assumed to be spread evenly"),
    Gap("grouped-products", "grouped products of experts: tokens are assumed to be spread evenly"),
    Gap("half-chosen", "selections whose size depends on the data: half of the elements is assumed"),
    Gap("generated-text", "text generated within a step: the time of its first tokens alone is counted"),
    Gap("no-process-group", "{} processes are stated, but no process group is made: what is judged is one process by itself"),
    Gap("nccl-buffers", "rank {} of {}: NCCL's buffers beyond those of an all-reduce are not counted"),
    Gap("cpu-link-time", "rank {} of {}: the time on the link is not counted"),
    Gap("no-sharding", "no model is wrapped or sharded: each process holds all of it"),
    Gap("fsdp-one-part", "FSDP wraps the model as one part: a rank holds all parameters at once while it computes"),
    Gap("network-assumed", "the network between the nodes is not stated: {} for each GPU are assumed"),
    Gap("link-assumed", "the link of {} is not known: {} GB/s are assumed"),
    Gap(
        "onnx-opaque-operators",
        "opaque operators: their bytes are counted, their arithmetic is not, and intervals are wider for it: {}",
    ),
    Gap("onnx-unknown-shapes", "{} operators whose output shape depends on the data, not counted: {}"),
    Gap(
        "onnx-quantised",
        "quantised operators: bytes as stored, arithmetic at the rate of float32, each operator on its own",
    ),
)
"""Every code with its sentence. A test holds the sentences against those that PerfGuard makes."""


def _pattern(sentence: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, sentence.split("{}"))), re.DOTALL)


_PATTERNS = tuple((gap.code, _pattern(gap.sentence)) for gap in GAPS)


def code_of(sentence: str) -> str:
    """Return the code of a sentence of :attr:`perfguard.Prediction.unmodelled`; "other" if it is none of the table.

    Example:
        >>> code_of("rank 0 of 8: NCCL's buffers beyond those of an all-reduce are not counted")
        'nccl-buffers'
    """
    return next((code for code, pattern in _PATTERNS if pattern.fullmatch(sentence)), OTHER)


def codes_of(sentences: Iterable[str]) -> list[str]:
    """Return the code of each of the ``sentences``, in their order."""
    return [code_of(sentence) for sentence in sentences]


def notes_of_unmodelled(sentences: Iterable[str]) -> list[str]:
    """Return a line for people for each of the ``sentences``, with its code: "not modelled [lbfgs]: LBFGS: ..."."""
    return [f"not modelled [{code_of(sentence)}]: {sentence}" for sentence in sentences]
