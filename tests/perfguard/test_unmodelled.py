"""What is not modelled has a code, whoever says it, and users find all codes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from perfguard import Estimate, Prediction
from perfguard.budget import Limit
from perfguard.capture.trial import KEPT, LBFGS
from perfguard.graph.libraries import HOST_OPTIMIZER, PAGED_STATES, TRITON
from perfguard.graph.selections import EVEN_CHOICES, GENERATED, GROUPED_PRODUCTS, HALF_CHOSEN
from perfguard.graph.trace import DATA_PARALLEL, TRACED_AS_EAGER
from perfguard.record import columns_of, verdict_from
from perfguard.unmodelled import GAPS, OTHER, code_of, codes_of, notes_of_unmodelled
from perfguard.verdict import Verdict

ROOT = Path(__file__).resolve().parents[2]
CONSTANTS = (
    KEPT, LBFGS, HOST_OPTIMIZER, PAGED_STATES, TRITON, EVEN_CHOICES, GENERATED, GROUPED_PRODUCTS, HALF_CHOSEN, DATA_PARALLEL,
    TRACED_AS_EAGER,
)  # fmt: skip
SOURCES = ("perfguard/graph/trace.py", "perfguard/capture/ranks.py", "perfguard/onnx/graph.py")
MEMORY = Estimate(1000.0, 0.1)


def yielded(source: str) -> Iterator[str]:
    """The sentences that functions named `unmodelled` make, with "several" for what differs from case to case."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        if function.name.strip("_") != "unmodelled":
            continue
        texts = {
            node.targets[0].id: node.value.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Yield) and isinstance(node.value, ast.Constant | ast.JoinedStr):
                yield _rendered(node.value, texts)


def _rendered(text: ast.Constant | ast.JoinedStr, texts: Mapping[str, object]) -> str:
    if isinstance(text, ast.Constant):
        return str(text.value)
    return "".join(_part(part, texts) for part in text.values)


def _part(part: ast.expr, texts: Mapping[str, object]) -> str:
    if isinstance(part, ast.FormattedValue):
        return str(texts.get(ast.unparse(part.value), "several"))
    assert isinstance(part, ast.Constant)
    return str(part.value)


def test_each_constant_has_a_code_of_its_own() -> None:
    codes = codes_of(CONSTANTS)
    assert OTHER not in codes
    assert len(set(codes)) == len(CONSTANTS)


@pytest.mark.parametrize("source", SOURCES)
def test_each_sentence_that_a_trace_makes_has_a_code(source: str) -> None:
    sentences = list(yielded((ROOT / source).read_text(encoding="utf-8")))
    assert len(sentences) >= 2
    # What is left on the link is one of two sentences, which the table has.
    without = [sentence for sentence in sentences if code_of(sentence) == OTHER]
    assert without in ([], ["rank several of several: several not counted"])


@pytest.mark.parametrize(
    ("sentence", "code"),
    [
        ("rank 0 of 8: NCCL's buffers beyond those of an all-reduce are not counted", "nccl-buffers"),
        ("rank 1 of 2: the time on the link is not counted", "cpu-link-time"),
        ("the network between the nodes is not stated: 50 GB/s for each GPU are assumed", "network-assumed"),
        ("the link of NVIDIA L4 is not known: 25 GB/s are assumed", "link-assumed"),
        (
            "torch.compile: operators merged into kernels as Inductor is expected to (3 kernels for 9 operators)",
            "compiled-kernels",
        ),
        ("of somebody else's predictor", OTHER),
        ("", OTHER),
    ],
)
def test_a_sentence_with_names_and_numbers_has_its_code(sentence: str, code: str) -> None:
    assert code_of(sentence) == code


def test_no_sentence_of_the_table_has_two_codes() -> None:
    codes = [gap.code for gap in GAPS]
    assert len(set(codes)) == len(codes)
    assert codes_of(gap.sentence for gap in GAPS) == codes


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


def test_the_documentation_has_each_code() -> None:
    page = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    for gap in GAPS:
        assert f"| `{gap.code}` | {gap.sentence.replace('{}', '…')} |" in page
