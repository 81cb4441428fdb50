"""The corpus: ordinary programs, each with its true steps. Its true bytes are those of a real run (`tests/live_bytes.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.corpus import domains, feeding, generative, habits, libraries, losses, optimizing, sequences, vision

Program = Callable[[], object]
PROGRAMS: Mapping[Program, int | None] = {
    **vision.PROGRAMS,
    **generative.PROGRAMS,
    **sequences.PROGRAMS,
    **habits.PROGRAMS,
    **domains.PROGRAMS,
    **feeding.PROGRAMS,
    **optimizing.PROGRAMS,
    **losses.PROGRAMS,
    **libraries.PROGRAMS,
}
"""The programs, with the steps that each makes. None: nobody knows them before."""
FURTHER = {
    "masked_words": 0.06,  # scaled_dot_product_attention of a CPU keeps something else than the kernel of a GPU
    "actor_and_critic": 0.06,  # the first step after a rollout is 5% higher than in the real run; why is not known
    "there_and_back": 1.0,  # a pool that a class of the program's own bounds is taken to grow to the end of the epoch
    "prefetched_batches": 0.15,  # what arrives while the last step's batch is there is taken to come when that is gone
    "average_in_evaluation": 0.02,  # likewise: the next batch is taken to be there while the average follows
}
"""By how much the bytes of a dry run differ from those of the real run, where that is more than 1%, and why."""


def fifth(number: int) -> list[Program]:
    """Return every fifth program, from ``number`` on, which is counted modulo 5."""
    return [*PROGRAMS][number % 5 :: 5]
