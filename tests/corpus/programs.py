"""The corpus: ordinary programs, each with its true steps. Its true bytes are those of a real run (`tests/live_bytes.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.corpus import generative, sequences, vision

Program = Callable[[], object]
PROGRAMS: Mapping[Program, int | None] = {**vision.PROGRAMS, **generative.PROGRAMS, **sequences.PROGRAMS}
"""The programs, with the steps that each makes. None: nobody knows them before."""
FURTHER = {
    "tabular": 0.06,
    "average_and_mixup": 0.05,
    "diffusion": 0.05,
    "clipped_by_hand": 0.04,
    "meta_learning": 0.04,
    "time_series": 0.03,
}
"""By how much the bytes of a dry run differ from those of the real run, where that is more than 1%. Why is not known yet: it may
be the dry run, or what a CPU does otherwise than a GPU."""


def fifth(number: int) -> list[Program]:
    """Return every fifth program, from ``number`` on, which is counted modulo 5."""
    return [*PROGRAMS][number % 5 :: 5]
