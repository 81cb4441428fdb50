"""How long a dry run takes whose steps add up the gradients of many micro-batches, with copies of them and without.

    OMP_NUM_THREADS=1 python benchmarks/micro_batches.py

The objective is a language model like GPT-2 (12 layers of 768 channels), trained on 12 sequences of 1,024 tokens a micro-batch
for twelve steps, with clipped gradients. Its verdict is for an absent A100. Seconds are processor time of the dry run alone, from
the objective's first line. "equal" compares operators, and storages with their bytes and lives.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from _record import parser_of, show
from torch import nn

from perfguard import resolve_device
from perfguard.capture.trial import capture

_STEPS = 12
_TOKENS = 50_304


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(2))
        self.qkv = nn.Linear(channels, 3 * channels)
        self.out = nn.Linear(channels, channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, channels = x.shape
        parts = self.qkv(self.norms[0](x)).split(channels, 2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, channels)
        x = x + self.out(attended)
        return x + self.mlp(self.norms[1](x))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """A language model, which returns its loss."""

    def __init__(self, channels: int = 768, layers: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_TOKENS, channels)
        self.places = nn.Embedding(1024, channels)
        self.blocks = nn.Sequential(*(Block(channels, channels // 64) for _ in range(layers)))
        self.head = nn.Linear(channels, _TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return F.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), targets.flatten())


def train(num_micro_batches: int) -> None:
    """Train as nanoGPT does."""
    model = Gpt().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(_STEPS):
        for _ in range(num_micro_batches):
            tokens = torch.randint(_TOKENS, (12, 1025)).cuda()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens[:, :-1], tokens[:, 1:]) / num_micro_batches
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


class Seen(NamedTuple):
    """What a dry run has shown, and its seconds."""

    seconds: float
    num_operators: int
    shown: Any


def dry_run(num_micro_batches: int, *, copies: bool) -> Seen:
    """Dry-run in this process, which is thrown away."""
    torch.set_num_threads(1)
    began = time.process_time()
    graph = capture(lambda: train(num_micro_batches), resolve_device("a100"), replays=copies).graph
    seconds = time.process_time() - began
    ops = [(op.name, op.phase, op.shape, op.flops) for op in graph.ops]
    storages = Counter((one.num_bytes, one.kind, one.birth, one.death) for one in graph.storages if one.num_bytes)
    return Seen(seconds, len(ops), (ops, storages, graph.peak_live_bytes))


def main() -> None:
    """Print a row for each number of micro-batches."""
    parser = parser_of(__doc__)
    parser.add_argument("--numbers", type=int, nargs="+", default=[1, 8, 40])
    arguments = parser.parse_args()
    rows = []
    for number in arguments.numbers:
        seen = []
        for copies in (True, False):
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                seen.append(pool.submit(dry_run, number, copies=copies).result())
        few, whole = seen
        seconds = f"{few.seconds:.1f} s", f"{whole.seconds:.1f} s", f"{whole.seconds / few.seconds:.1f} x"
        rows.append([str(number), f"{few.num_operators:,}", *seconds, "yes" if few.shown == whole.shown else "no"])
    columns = ["micro-batches", "operators of a step", "copied", "all recorded", "ratio", "equal"]
    show("micro-batches", columns, rows, record=arguments.record)


if __name__ == "__main__":
    main()
