"""An argument of an operator is found by its name, wherever it stands."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from perfguard.graph.arguments import argument_of

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [((), {}, False), ((-1, False, True), {}, True), ((), {"sparse": True}, True)],
    ids=["default", "position", "keyword"],
)
def test_argument_is_found_by_its_name(args: tuple[Any, ...], kwargs: dict[str, Any], expected: bool) -> None:
    table, rows = torch.zeros(5, 2), torch.tensor([1])
    assert argument_of(aten.embedding.default, (table, rows, *args), kwargs, "sparse") is expected


def test_an_argument_that_an_operator_does_not_have_is_none() -> None:
    assert argument_of(aten.mm.default, (torch.zeros(1, 1), torch.zeros(1, 1)), {}, "is_causal") is None
