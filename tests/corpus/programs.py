"""The corpus: ordinary programs, each with its true steps. Its true bytes are those of a real run (`tests/live_bytes.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.corpus import generative, sequences, vision

Program = Callable[[], object]
PROGRAMS: Mapping[Program, int | None] = {**vision.PROGRAMS, **generative.PROGRAMS, **sequences.PROGRAMS}
"""The programs, with the steps that each makes. None: nobody knows them before."""
FURTHER = {
    "diffusion": 0.05,
}
"""By how much the bytes of a dry run differ from those of the real run, where that is more than 1%. `mse_loss` returns its mean
in a storage as large as its inputs (`TORCH_META_FUNC(mse_loss)` of PyTorch 2.13), and does not on meta."""


def fifth(number: int) -> list[Program]:
    """Return every fifth program, from ``number`` on, which is counted modulo 5."""
    return [*PROGRAMS][number % 5 :: 5]
