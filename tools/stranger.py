"""Plays a first user: a fresh clone, a bare environment, and nothing but the README.

    python tools/stranger.py               # prints each step with its seconds; some minutes
    python tools/stranger.py --patience 3  # on a slow or busy machine: three times the limits

It clones the last commit of this checkout, runs what stands in the README's code blocks (all but `make test`), interrupts the
demo, guards a script of its own, and types wrong things. The first step that fails or passes its limit ends it with status 1.
The limits are about three times what 2 slow cores need: they are there for what hangs.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```([^\n`]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LEFT_OUT = {"make test": "CI runs it anyway"}
INSTALL_LIMIT_S, DEMO_LIMIT_S, SCRIPT_LIMIT_S, COMMAND_LIMIT_S = 420, 220, 90, 45

PLAIN_SCRIPT = """\
import optuna
import torch
from torch import nn


def make_model(params):
    return nn.Sequential(nn.Linear(64, params["width"]), nn.ReLU(), nn.Linear(params["width"], 1))


def objective(trial):
    model = make_model({"width": trial.suggest_categorical("width", [32, 64, 1_000_000])})
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True))
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.ones(32, 64)).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=5))
study.optimize(objective, n_trials=4)
print(len(study.trials), "trials")
"""
"""A study of somebody who has not heard of PerfGuard. One width of three needs some 500 MiB."""

THREE_LINES = {
    "import optuna\n": "import optuna\nimport perfguard_optuna\nfrom perfguard import Workload\n",
    "optuna.create_study(": "perfguard_optuna.create_study(",
    "n_trials=4": 'n_trials=4, pruner=perfguard_optuna.PerfGuardPruner(gpu="cpu", build=build, memory_budget="100MiB")',
    "\n\ndef objective": "\n\ndef build(params):\n"
    "    return Workload(make_model(params), inputs=(32, 64), loss=lambda output: output.square().mean())\n\n\ndef objective",
}
"""What that person replaces: the README's lines 1 to 3, and their imports."""


class StepFailed(Exception):
    """What was wrong with a step."""


def code_of(page: str, language: str) -> list[str]:
    """The code of the blocks of ``page`` that are fenced as ``language``, in order."""
    return [block[2] for block in BLOCK.finditer(page) if block[1] == language]


def commands_of(page: str) -> Iterator[str]:
    """The commands of its blocks fenced as ``bash``, without comments; a backslash at the end of a line joins two lines."""
    for code in code_of(page, "bash"):
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield shlex.join(words)


class Stranger:
    """Runs steps and prints them.

    Args:
        folder: where all happens; empty.
        patience: factor on all limits.
    """

    def __init__(self, folder: Path, patience: float) -> None:
        self.clone, self.mine, home = folder / "perfguard", folder / "mine", folder / "home"
        self.mine.mkdir()
        home.mkdir()
        self._patience = patience
        self._printed = folder / "printed.txt"
        left_out = ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "PERFGUARD_LOG")
        self._environment = {name: value for name, value in os.environ.items() if name not in left_out}
        self._environment |= {
            "HOME": str(home),  # PerfGuard's log is in it
            "PIP_CACHE_DIR": os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip")),
            "PYTHONUNBUFFERED": "1",
            "PATH": f"{self.clone / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",  # as `activate` does
        }

    def step(
        self, name: str, command: str, limit_s: float, *, status: int = 0, cwd: Path | None = None, interrupt_at: str = ""
    ) -> str:
        """Run ``command`` in a shell, in the clone or in ``cwd``, and print the step with its seconds.

        Args:
            status: the exit status that is right.
            interrupt_at: press Ctrl-C as soon as this is printed; empty: never.

        Returns:
            What the command printed.

        Raises:
            StepFailed: for another status, for a traceback, or when the step takes more than ``limit_s``.
        """
        start, limit_s = time.monotonic(), limit_s * self._patience
        with self._printed.open("wb") as printed:
            child = subprocess.Popen(
                ["bash", "-c", command],
                cwd=cwd or self.clone,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                while child.poll() is None and time.monotonic() - start < limit_s:
                    if interrupt_at and interrupt_at in self._text():
                        os.killpg(child.pid, signal.SIGINT)
                        interrupt_at = ""
                    time.sleep(0.1)
            finally:
                ended = child.poll()
                if ended is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
                elif ended < 0:
                    ended = 128 - ended  # of a signal, as the shell has it
        text = self._text()
        line = f"{time.monotonic() - start:6.1f} s of at most {limit_s:4.0f}  {name}"
        wrong = (
            "it passed its limit"
            if ended is None
            else f"its exit status is {ended}, not {status}"
            if ended != status
            else "it printed a traceback"
            if "Traceback (most recent call last)" in text
            else ""
        )
        print(f"{'failed' if wrong else 'ok':6s} {line}", flush=True)
        if wrong:
            raise StepFailed(f"{name}: {wrong}. `{command}` printed:\n{text[-5000:]}")
        return text

    def _text(self) -> str:
        return self._printed.read_text(encoding="utf-8", errors="replace")

    def wrong(self, name: str, command: str, status: int) -> None:
        """A step that must end with ``status`` and one line that says why."""
        text = self.step(name, command, COMMAND_LIMIT_S, status=status)
        expect(
            text.startswith("perfguard: ") and text.count("\n") == 1, f"{name}: one line was expected, but there came:\n{text}"
        )


def expect(holds: bool, message: str) -> None:
    """Raise a StepFailed with ``message`` if it does not hold."""
    if not holds:
        raise StepFailed(message)


def clone(stranger: Stranger) -> None:
    """The last commit of this checkout. Where git does not take it for a repository of this user's, a copy of its files."""
    if shutil.which("git") and subprocess.run(["git", "-C", ROOT, "rev-parse"], capture_output=True, check=False).returncode == 0:
        command = f"git clone --quiet {shlex.quote(str(ROOT))} {shlex.quote(str(stranger.clone))}"
        stranger.step("git clone", command, 60, cwd=stranger.mine)
        return
    print("Git cannot clone this checkout: the files are copied.", flush=True)
    ignored = shutil.ignore_patterns(".venv", "out", "build", "dist", ".git", ".*_cache", ".hypothesis", "__pycache__")
    shutil.copytree(ROOT, stranger.clone, ignore=ignored)


def play(stranger: Stranger) -> None:
    """All steps, in the order of the README."""
    clone(stranger)
    page = (stranger.clone / "README.md").read_text(encoding="utf-8")
    commands = list(commands_of(page))
    check = next(command for command in commands if command.startswith("perfguard check"))
    stranger.step("install: make demo ARGS=--help", "make demo ARGS=--help", INSTALL_LIMIT_S)
    text = stranger.step("make demo, and Ctrl-C", "make demo", DEMO_LIMIT_S, status=130, interrupt_at=" launched ")
    expect("interrupted" in text, f"The demo does not say that it was interrupted:\n{text}")
    for command in commands:
        if command in LEFT_OUT:
            print(f"left out: {command} ({LEFT_OUT[command]})", flush=True)
            continue
        limit_s = DEMO_LIMIT_S if command == "make demo" else INSTALL_LIMIT_S if "install" in command else COMMAND_LIMIT_S
        text = stranger.step(command, command, limit_s)
        if command == "make demo":
            expect("The same search for" in text, f"The demo has no table:\n{text}")
            print(text[text.rindex("The same search for") :].rstrip(), flush=True)
            expect((stranger.clone / "out" / "report.html").stat().st_size > 100_000, "The demo's report is empty.")
    too_little = re.sub(r"--max-memory \S+", "--max-memory 1GiB", check)
    expect(too_little != check, f"The README's check has no --max-memory: {check}")
    stranger.step("perfguard check, that does not fit", too_little, COMMAND_LIMIT_S, status=1)
    guard_scripts(stranger, page)
    stranger.step("perfguard report", "perfguard report --out report.html", COMMAND_LIMIT_S, cwd=stranger.mine)
    expect("width" in (stranger.mine / "report.html").read_text(encoding="utf-8"), "The report does not show the own study.")
    stranger.wrong("an unknown GPU", re.sub(r"--gpu \S+", "--gpu a1000", check), 2)
    stranger.wrong("a missing file", check.replace("models.py", "absent.py"), 2)
    stranger.wrong("a missing log", "perfguard report absent.db", 2)


def guard_scripts(stranger: Stranger, page: str) -> None:
    """The README's script, and one that exists already and gets the three lines."""
    (script,) = code_of(page, "python")
    guarded = PLAIN_SCRIPT
    for before, after in THREE_LINES.items():
        expect(guarded.count(before) == 1, f"The plain script must have {before!r} once.")
        guarded = guarded.replace(before, after)
    scripts: Mapping[str, str] = {"readme.py": script, "plain.py": PLAIN_SCRIPT, "guarded.py": guarded}
    for name, code in scripts.items():
        (stranger.mine / name).write_text(code, encoding="utf-8")
        text = stranger.step(f"python {name}", f"python {name}", SCRIPT_LIMIT_S, cwd=stranger.mine)
        if name == "guarded.py":
            expect("pruned. needs" in text, f"No trial of guarded.py was pruned:\n{text}")


def main() -> None:
    """Play, and end with status 1 if a step failed."""
    parser = argparse.ArgumentParser(description="Plays a first user of the last commit.")
    parser.add_argument("--patience", type=float, default=1.0, metavar="FACTOR", help="on all limits")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores Ctrl-C, and so would the demo
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stranger-") as folder:
        try:
            play(Stranger(Path(folder), arguments.patience))
        except StepFailed as failure:
            print(failure, flush=True)
            sys.exit(1)
        print(f"all steps took {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
