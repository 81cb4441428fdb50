"""A fifth of the corpus each day: it comes through, its live bytes are those of a real run, and its steps are right."""

from __future__ import annotations

import datetime

import pytest

from perfguard.capture.trial import capture
from perfguard.devices import resolve_device
from tests.corpus.programs import FURTHER, PROGRAMS, Program, fifth
from tests.live_bytes import peak_live_bytes

A100 = resolve_device("a100")


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step", "ignore:'pin_memory' argument is set as true")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of libraries, about each other
@pytest.mark.parametrize(
    "program", fifth(datetime.datetime.now(tz=datetime.UTC).toordinal()), ids=lambda program: program.__name__
)
def test_program_of_the_corpus_is_seen_as_it_is(program: Program) -> None:
    found = capture(program, A100)
    if found.may_be_lost:  # as `DryRuns` does
        found = capture(program, A100, replays=False)
    assert found.steps == PROGRAMS[program]
    seen = max(graph.peak_live_bytes for graph in (found.graph, *found.phases.values()))
    assert seen == pytest.approx(peak_live_bytes(program), rel=FURTHER.get(program.__name__, 0.01))
