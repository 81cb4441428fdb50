"""The server of dry runs imports what dry runs have imported of installed packages, so that none pays for it again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from perfguard.capture import Answer, Ask, DryRuns
from perfguard.capture.preload import imported_since, preload
from perfguard.devices import resolve_device
from perfguard.exceptions import CaptureError
from tests.warm import run_fresh

A100 = resolve_device("a100")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its children are Linux's")
NAMES = ("made_up_library", "made_up_library.part", "made_up_own", "made_up_broken")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two installed packages, one of which cannot be imported twice, and a file of the user's own."""
    site = tmp_path / "lib" / "site-packages"
    (site / "made_up_library").mkdir(parents=True)
    asks = "import torch\nsees_gpu = torch.cuda.is_available()\n"
    (site / "made_up_library" / "__init__.py").write_text(asks, encoding="utf-8")
    (site / "made_up_library" / "part.py").write_text("", encoding="utf-8")
    (site / "made_up_broken.py").write_text("raise SystemExit('of no use here')\n", encoding="utf-8")
    (tmp_path / "made_up_own.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield site
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture
def dry(packages: Path) -> Iterator[Callable[..., DryRuns]]:
    made: list[DryRuns] = []

    def make(objective: Callable[[Ask], object]) -> DryRuns:
        made.append(DryRuns(objective, A100))
        return made[-1]

    yield make
    for runs in made:
        runs.close()


def train_one() -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()


def objective(ask: Ask) -> None:
    """Say which modules are here already, then import them."""
    found = [name for name in NAMES if name in sys.modules]
    ask(" ".join(found))
    ask(str(getattr(sys.modules.get("made_up_library"), "sees_gpu", "")))
    import_as_a_trial_does()
    assert sys.modules["made_up_library"].sees_gpu
    train_one()


def import_as_a_trial_does() -> None:
    import_module("made_up_library.part")
    import_module("made_up_own")


def said_by(runs: DryRuns) -> list[str]:
    """What the objective says in one more dry run."""
    said: list[str] = []

    def answer(text: str) -> Answer:
        said.append(text)
        return Answer(f"{len(said)}", object())  # never one of an earlier trial

    runs.capture(answer)
    return said[-2:]  # before, the questions of an earlier dry run are asked again


def test_a_dry_run_finds_what_an_earlier_one_and_a_trial_have_imported(dry: Callable[..., DryRuns]) -> None:
    runs = dry(objective)
    assert said_by(runs)[0] == ""
    import_as_a_trial_does()
    second = said_by(runs)
    assert second[0] == "made_up_library made_up_library.part", "not the user's own file, which may change"
    assert second[1] == "True", "CUDA answers as it does in a dry run"


def test_what_no_trial_has_imported_is_left_to_each_dry_run(dry: Callable[..., DryRuns]) -> None:
    runs = dry(objective)
    assert [said_by(runs)[0] for _ in range(2)] == ["", ""]


def test_a_failed_dry_run_says_what_it_has_imported_too(dry: Callable[..., DryRuns]) -> None:
    def fails(ask: Ask) -> None:
        ask(" ".join(name for name in NAMES if name in sys.modules))
        import_module("made_up_library")
        raise ValueError("of the user's")

    runs, said = dry(fails), []

    def answer(text: str) -> Answer:
        said.append(text)
        return Answer("x", object())

    for _ in range(2):
        with pytest.raises(CaptureError, match="of the user's"):
            runs.capture(answer)
        import_as_a_trial_does()
    assert (said[0], said[-1]) == ("", "made_up_library")


def test_the_stage_has_the_compiler_of_pytorch() -> None:
    """PyTorch imports it with the first optimizer. Each dry run paid for it where the server did not have it."""
    code = "import sys\nfrom perfguard.capture.child import load_stage\nload_stage()\nprint('torch._dynamo' in sys.modules)"
    assert run_fresh("-c", code).split() == ["True"]


def test_a_module_that_cannot_be_imported_is_left_out(packages: Path) -> None:
    preload(["made_up_broken", "made_up_library"], A100)
    assert "made_up_broken" not in sys.modules
    assert sys.modules["made_up_library"].sees_gpu
    assert torch.cuda.is_available() is (torch.version.cuda is not None and torch.cuda.device_count() > 0), "as before"


def test_modules_under_another_name_are_not_named(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Anything:
        def __getattr__(self, name: str) -> Any:
            return self

    before = {*sys.modules}
    import_as_a_trial_does()
    monkeypatch.setitem(sys.modules, "made_up_alias", sys.modules["made_up_library"])
    monkeypatch.setitem(sys.modules, "made_up_anything", Anything())
    assert imported_since(before) == ("made_up_library", "made_up_library.part")
