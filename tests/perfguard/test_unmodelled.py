"""What is not modelled has a code, whoever says it, and users find all codes."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from perfguard import Estimate, Prediction
from perfguard.budget import Limit
from perfguard.graph import OpGraph
from perfguard.record import columns_of, verdict_from
from perfguard.unmodelled import GAPS, KEPT, LBFGS, LINK_ASSUMED, NCCL_BUFFERS, OTHER, Unmodelled, notes_of_unmodelled
from perfguard.verdict import Verdict

ROOT = Path(__file__).resolve().parents[2]
MEMORY = Estimate(1000.0, 0.1)


def test_no_code_and_no_sentence_of_the_table_occurs_twice() -> None:
    assert len({gap.code for gap in GAPS}) == len({gap.sentence for gap in GAPS}) == len(GAPS)
    assert OTHER not in {gap.code for gap in GAPS}


def test_only_the_table_makes_codes() -> None:
    # A sentence that is made elsewhere would have no row in the documentation.
    sources = [path for folder in ("perfguard", "models", "integrations") for path in (ROOT / folder).rglob("*.py")]
    makers = {path.name for path in sources if " Unmodelled(" in path.read_text(encoding="utf-8")}
    assert makers == {"unmodelled.py", "opgraph.py"}  # the second reads what was stored


def test_a_sentence_with_names_and_numbers_keeps_its_code() -> None:
    said = NCCL_BUFFERS.of(0, 8)
    assert said.code == NCCL_BUFFERS.code
    assert str(said) == "rank 0 of 8: NCCL's buffers beyond those of an all-reduce are not counted"
    assert LINK_ASSUMED.of("NVIDIA L4", 25) != LINK_ASSUMED.of("NVIDIA L4", 50)


def test_a_note_has_the_code_beside_the_sentence() -> None:
    assert notes_of_unmodelled([LBFGS]) == [f"not modelled [lbfgs]: {LBFGS}"]


def test_a_verdict_keeps_the_codes_in_the_log() -> None:
    unmodelled = (LBFGS, KEPT, LBFGS)
    prediction = Prediction(MEMORY, MEMORY, None, "double-1", "toy", True, unmodelled=unmodelled)
    verdict = Verdict.of(prediction, [Limit("memory", 2000.0, MEMORY)], accepted=0.05)
    columns = columns_of(verdict)
    assert columns["unmodelled"] == "lbfgs, kept-outputs"
    read = verdict_from(columns)
    assert read is not None
    assert read.unmodelled == verdict.unmodelled


@pytest.mark.parametrize(
    ("sentence", "gap"),
    [(LBFGS.sentence, LBFGS), ("rank 0 of 8: in older words", Unmodelled(OTHER, "rank 0 of 8: in older words"))],
)
def test_a_graph_that_was_stored_without_codes_gets_them_by_its_sentences(sentence: str, gap: Unmodelled) -> None:
    graph = OpGraph((), (), mode="train", precision="fp32", layout="nchw", unmodelled=(LBFGS,))
    document = json.loads(zlib.decompress(graph.to_bytes()))
    assert document["unmodelled"] == [["lbfgs", LBFGS.sentence]]
    stored = document | {"schema": 3, "unmodelled": [sentence]}
    assert OpGraph.from_bytes(zlib.compress(json.dumps(stored).encode())).unmodelled == (gap,)


def test_the_documentation_has_each_code() -> None:
    page = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    for gap in GAPS:
        assert f"| `{gap.code}` | {gap.sentence.replace('{}', '…')} |" in page
