"""What the documentation shows runs, its links lead somewhere, and the reference is that of the docstrings."""

from __future__ import annotations

import datetime
import functools
import importlib
import io
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from perfguard import cli
from perfguard.cli import main
from tests.warm import run_warm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import _record  # noqa: E402

RESULTS = runpy.run_path(str(ROOT / "tools" / "results.py"))
STRANGER = runpy.run_path(str(ROOT / "tools" / "stranger.py"))
BLOCK: re.Pattern[str] = STRANGER["BLOCK"]
SKILL = ROOT / "perfguard-preflight" / "SKILL.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", SKILL, *sorted((ROOT / "docs").rglob("*.md"))]
pytestmark = pytest.mark.timeout(900)  # a page takes half a minute, and ten times as long where the machine is busy


def python_of(text: str) -> str:
    """The blocks fenced as ```python, each at the lines where the page has it, so that a traceback names the page's lines.

    A block fenced as ```python no-run is left out.
    """
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        if block[1] == "python":
            first, code = text.count("\n", 0, block.start(2)), block[2].splitlines()
            lines[first : first + len(code)] = code
    return "\n".join(lines)


def commands_of(text: str) -> Iterator[list[str]]:
    """The arguments of each `perfguard` command in the blocks fenced as ```bash."""
    for command in STRANGER["commands_of"](text):
        program, *arguments = shlex.split(command)
        if program == "perfguard":
            yield arguments


def run_python(*arguments: str, cwd: Path) -> None:
    status, printed = run_warm(*arguments, cwd=cwd, timeout_s=800)
    assert status == 0, printed


def test_blocks_are_found_where_they_stand() -> None:
    page = (
        "# Title\n\n```python\na = 1\n\nb = 2\n```\n```python no-run\nc = 3\n```\n```text\nd\n```\n\n"
        "```python\ne = 5\n```\n\n```bash\nmake demo    # first\nperfguard predict f.py:build \\\n    --gpu a100   # then\n```\n"
    )
    lines = python_of(page).splitlines()
    assert {number: line for number, line in enumerate(lines, 1) if line} == {4: "a = 1", 6: "b = 2", 16: "e = 5"}
    assert list(commands_of(page)) == [["predict", "f.py:build", "--gpu", "a100"]]
    assert list(STRANGER["commands_of"](page)) == ["make demo", "perfguard predict f.py:build --gpu a100"]


LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    # GitHub shows a broken link as any other.
    broken = []
    for file, anchor in LINK.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors_of(target.read_text(encoding="utf-8"))):
            broken.append(f"{file}#{anchor}")
    assert not broken


@functools.cache
def help_of(*words: str) -> str | None:
    """What `perfguard WORDS --help` prints. None: there is no such command."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(io.StringIO()):
            main([*words, "--help"])
    except SystemExit as end:
        return printed.getvalue() if not end.code else None
    return printed.getvalue()


def mentions_of(text: str) -> Iterator[list[str]]:
    """The words of each `perfguard` command in ``text``: in a block of commands, or between backticks."""
    for block in BLOCK.finditer(text):
        if not block[1].startswith("python"):
            lines = (line.partition(" #")[0] for line in block[2].splitlines())
            yield from (line.split() for line in lines if line.startswith("perfguard "))
    yield from (code.split() for code in re.findall(r"`(perfguard [^`\n]+)`", BLOCK.sub("", text)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_command_that_a_page_names_exists_with_its_options(page: Path) -> None:
    """docs/check.md named a command that was gone."""
    commands = set(re.findall(r"^    ([a-z-]+)(?: |$)", help_of() or "", re.MULTILINE))
    assert {"check", "log"} <= commands
    wrong = []
    for _, *words in mentions_of(page.read_text(encoding="utf-8")):
        name = words[0]
        if not name.startswith("-") and not name.isupper() and name not in commands:
            wrong.append(name)
            continue
        verb = words[1:2] if name in ("log", "weights") and re.fullmatch("[a-z]+", words[1] if words[1:] else "") else []
        known = help_of(name, *verb) if name in cli._COMMANDS else None
        own = words[: words.index("--")] if "--" in words else words
        options = [re.sub(r"[^\w-].*", "", word) for word in own if word.startswith("--")]
        wrong += [f"{name} {option}" for option in options if known and not re.search(rf"{option}\b", known)]
        if verb and known is None:
            wrong.append(f"{name} {verb[0]}")
    assert not wrong


def test_skill_says_what_an_agent_is_to_look_for_and_names_keys_that_there_are() -> None:
    """An agent reads the front matter of a skill to choose it, and its tables to read the answer."""
    text = SKILL.read_text(encoding="utf-8")
    front, _, body = text.removeprefix("---\n").partition("\n---\n")
    assert dict(line.split(": ", 1) for line in front.splitlines())["name"] == SKILL.parent.name
    assert 50 < len(front) < 1024
    documented = (ROOT / "docs" / "check.md").read_text(encoding="utf-8").partition("## JSON output")[2]
    keys = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", body.partition("Keys of the JSON")[2], re.MULTILINE)
    named = {key for row in keys for key in re.findall(r"`(\w+)`", row)}
    assert {"limits", "p_exceeded", "unmodelled"} <= named
    assert all(f"`{key}`" in documented for key in named)


def test_each_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    listed = {file for file, _ in LINK.findall(index)}
    assert pages - {"README.md"} <= listed


def test_the_navigation_has_each_page_and_no_other() -> None:
    toc = (ROOT / "docs" / "_toc.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:file|root): (docs/\S+)", toc))
    for pattern in re.findall(r"glob: (docs/\S+)", toc):
        named |= {page.relative_to(ROOT).with_suffix("").as_posix() for page in ROOT.glob(f"{pattern}.md")}
    assert named == {page.relative_to(ROOT).with_suffix("").as_posix() for page in (ROOT / "docs").rglob("*.md")}


def test_reference_is_up_to_date() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "reference.py"))["page"]()
    assert made == (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), "run: python tools/reference.py"


def test_results_pages_are_what_the_json_gives() -> None:
    # A number in a results page cannot be typed by hand.
    assert not list(RESULTS["problems"](RESULTS["PAGES"]))


def test_a_typed_number_a_typed_table_and_json_without_a_page_are_found(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "unused.json").write_text("{}")
    page = RESULTS["filled"]("# Speed\n\n<!-- table: decisions -->\n<!-- end -->\n")
    (tmp_path / "good.md").write_text(page, encoding="utf-8")
    (tmp_path / "typed.md").write_text(re.sub(r"\d \|\n", "999 |\n", page, count=1) + "\n| a | b |\n", encoding="utf-8")
    found = [line for line in RESULTS["problems"](tmp_path) if "shows the table" not in line or "unused" in line]
    assert [line.partition(" has")[0].partition(" is not")[0] for line in found] == [
        "typed.md", "typed.md", "No page shows the table unused.",
    ]  # fmt: skip


def test_a_recorded_table_is_read_back_and_says_how_it_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        str(tmp_path / "benchmarks" / "speed.py"),
        str(tmp_path / "table.csv"),
        "--cache",
        "/tmp/c",
        "--rows",
        "3",
        "--record",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    _record.show("speed", ["what", "ms"], [["cold, ± 5%", "1.5"], ["warm", "0.2"]], record=tmp_path)
    table = json.loads((tmp_path / "speed.json").read_text(encoding="utf-8"))
    assert table["command"] == "OMP_NUM_THREADS=1 python benchmarks/speed.py PATH --rows 3"
    text = RESULTS["markdown"](table)
    assert f"{datetime.date.today()}, " in text
    assert text.endswith("| what | ms |\n| :--- | ---: |\n| cold, ± 5% | 1.5 |\n| warm | 0.2 |\n")
    assert "warm" in capsys.readouterr().out


@pytest.mark.parametrize("package", ["perfguard", "perfguard_optuna", "perfguard_ray"])
def test_reference_has_every_public_object(package: str) -> None:
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    _, _, part = text.partition(f"\n## {package}\n")
    headings = re.findall(r"^### (.+)$", part.partition("\n## ")[0], re.MULTILINE)
    assert headings == importlib.import_module(package).__all__


EXECUTED = [page for page in PAGES if page.parent != ROOT or page.name != "README.md"]
"""`tools/stranger.py`, which CI runs, runs what the README shows, and in a fresh environment."""
WITH_CODE = [page for page in EXECUTED if python_of(page.read_text(encoding="utf-8")).strip()]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{page.name}.py"
    script.write_text(python_of(page.read_text(encoding="utf-8")), encoding="utf-8")
    run_python(str(script), cwd=tmp_path)


COMMANDS = {shlex.join(command): command for page in EXECUTED for command in commands_of(page.read_text(encoding="utf-8"))}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_documentation_runs(command: str) -> None:
    run_python("-m", "perfguard.cli", *COMMANDS[command], cwd=ROOT)
