"""A sample of a table of runs: whole networks, drawn before anything is traced."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pandas as pd

from perfguard.exceptions import PerfGuardError
from perfguard_research.csv_rows import read_table
from perfguard_research.tables import CONFIGURATIONS, parser_of


def sampled(tables: Iterable[Path], most_runs: int, *, folder: Path, seed: int = 0) -> list[Path]:
    """The tables, with at most ``most_runs`` rows of each, in folders inside ``folder``. Tables of operators stay as they are.

    Networks are drawn with ``seed``, and each has all of its rows. So a network is traced once, and the batches of one network
    stay neighbours. Rows that cannot be read are left out.

    Raises:
        TableError: if a table cannot be read or is of no known kind.
    """
    found = []
    for table in tables:
        columns, rows = read_table(table)
        parse = parser_of(columns, table)
        if "op" in columns or len(rows) <= most_runs:
            found.append(table)
            continue
        networks: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
        for row in rows:
            with suppress(PerfGuardError):
                networks[str(parse(row).structure)].append(row)
        chosen: list[dict[str, str]] = []
        for name in random.Random(seed).sample(sorted(networks), len(networks)):
            if len(chosen) + len(networks[name]) <= most_runs:
                chosen += networks[name]
        digest = hashlib.sha256(repr((columns, chosen)).encode()).hexdigest()[:16]
        own = folder / f"{table.name.split('.')[0]}-{digest}"
        own.mkdir(parents=True, exist_ok=True)
        if (configurations := table.with_name(CONFIGURATIONS)).exists():
            shutil.copy(configurations, own)
        found.append(own / "sample.csv")
        pd.DataFrame(chosen, columns=columns).to_csv(found[-1], index=False)
    return found
