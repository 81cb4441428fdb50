"""What the script that plays a first user reads in the README."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STRANGER = runpy.run_path(str(ROOT / "tools" / "stranger.py"))


def test_commands_are_those_of_the_bash_blocks() -> None:
    page = (
        '```bash\n# first\nmake demo    # second\n\npip install -e ".[optuna]"\nperfguard gpus \\\n    --help\n```\n'
        "```text\nmake no\n```\n```python\na = 1\n```\n"
    )
    assert list(STRANGER["commands_of"](page)) == ["make demo", "pip install -e '.[optuna]'", "perfguard gpus --help"]
    assert STRANGER["code_of"](page, "python") == ["a = 1\n"]


def test_the_readme_has_what_a_stranger_does() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = list(STRANGER["commands_of"](page))
    assert {"make demo", *STRANGER["LEFT_OUT"]} <= set(commands)
    assert [words.split()[1] for words in commands if words.startswith("perfguard ")].count("check") == 1
    assert len(STRANGER["code_of"](page, "python")) == 1


def test_the_plain_script_takes_the_three_lines() -> None:
    assert all(STRANGER["PLAIN_SCRIPT"].count(before) == 1 for before in STRANGER["THREE_LINES"])
