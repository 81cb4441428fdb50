"""The table that the weights for CPUs were trained on is in the repository, so anyone can train them again."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from perfguard_research.tables import read_rows

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "benchmarks" / "data" / "cpu.csv.gz"


@pytest.mark.parametrize("name", ["cpu-two-clocks", "cpu-memory-forest"])
def test_cards_of_the_weights_for_cpus_have_the_rows_of_the_table(name: str) -> None:
    card = json.loads((ROOT / "models" / "perfguard_models" / "weights" / f"{name}.json").read_text(encoding="utf-8"))
    rows = read_rows(TABLE)
    used = Counter(f"collected {row.source} cpu {row.mode}" for row in rows if row.status == "ok")
    assert card["rows"] == used
