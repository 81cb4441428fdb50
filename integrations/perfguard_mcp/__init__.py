"""An MCP server (Model Context Protocol): an agent asks PerfGuard before it starts a training script.

    pip install 'perfguard[mcp]'
    perfguard mcp        # on standard input and output, as a client starts it

Each tool is a command of ``perfguard`` with ``--json``, run in a process of its own. So the answers are those of the command
line, and a script that ends the process ends only that one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from perfguard.exceptions import ConfigurationError

try:
    import anyio
    from mcp.server.mcpserver import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.types import ToolAnnotations
except ModuleNotFoundError as missing:
    raise ConfigurationError(
        f"`perfguard mcp` needs the package mcp of version 2 ({missing.name} is missing): pip install 'perfguard[mcp]'"
    ) from missing

_INSTRUCTIONS = (
    "Call check before a PyTorch training script is started or submitted, and after each change of its batch size, precision, "
    "model or optimizer. Nothing is computed, no file is written and no GPU is needed. Tell the user the 90% interval, and "
    "whatever is in unmodelled and notes. Call dry_run with explain to see which module needs the memory."
)
_CHANGES_NOTHING = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_ANSWERED = 0, 1, 3
"""Exit statuses of `perfguard check` with an answer: it fits, it does not, it cannot be told."""

server = MCPServer("perfguard", instructions=_INSTRUCTIONS)


@server.tool(annotations=_CHANGES_NOTHING)
async def check(
    script: str,
    gpu: str,
    folder: str,
    arguments: Sequence[str] = (),
    is_module: bool = False,
    world_size: int | None = None,
    steps: int | None = None,
    max_memory: str | None = None,
    max_host_memory: str | None = None,
    max_trial_time: str | None = None,
) -> dict[str, Any]:
    """Check whether a PyTorch training script fits a GPU and other limits, without running it.

    Args:
        script: its path in the folder, or the name of a module.
        gpu: a name of list_gpus, for instance "a100-sxm-80gb".
        folder: where it would run.
        arguments: the script's own words, for instance ["--batch-size", "64"].
        is_module: whether it is started as `python -m`.
        world_size: processes that torchrun would start.
        steps: of the whole run, if the script does not show them.
        max_memory: a lower limit than all memory of the device, for instance "38GiB".
        max_host_memory: for instance "64GiB".
        max_trial_time: for instance "2h".

    Returns:
        "result" ("fits", "does not fit", "cannot tell"), "reason", "limits" with the 90% interval of each, "unmodelled", "notes".
    """
    limits = {"max-memory": max_memory, "max-host-memory": max_host_memory, "max-trial-time": max_trial_time}
    options = {"gpu": gpu, "world-size": world_size, "steps": steps, **limits}
    return await _answer(["check", *_words(script, is_module=is_module, options=options), "--", *arguments], folder)


@server.tool(annotations=_CHANGES_NOTHING)
async def dry_run(
    script: str,
    gpu: str,
    folder: str,
    arguments: Sequence[str] = (),
    is_module: bool = False,
    world_size: int | None = None,
    steps: int | None = None,
    explain: bool = False,
) -> dict[str, Any]:
    """Predict the memory and the time of a PyTorch training script on a GPU, without running it.

    Args:
        script, gpu, folder, arguments, is_module, world_size, steps: as check takes them.
        explain: also bytes by module, time by operator, and how each number came to be.

    Returns:
        "peak_memory_bytes", "step_time_s", "total_time_s" (each with "median", "low", "high"), "p_oom", "steps", "unmodelled".
    """
    options = {"gpu": gpu, "world-size": world_size, "steps": steps}
    more = ["--explain"] if explain else []
    return await _answer(["dry-run", *_words(script, is_module=is_module, options=options), *more, "--", *arguments], folder)


@server.tool(annotations=_CHANGES_NOTHING)
def list_gpus() -> dict[str, str]:
    """List the GPUs that the other tools know: the names by their ids."""
    from perfguard.devices import catalog

    return {id_: device.name for id_, device in catalog().items()}


def _words(script: str, *, is_module: bool, options: dict[str, str | int | None]) -> Iterator[str]:
    if is_module:
        yield "-m"
    yield script
    for name, value in options.items():
        if value is not None:
            yield f"--{name}={value}"
    yield "--json"


async def _answer(words: list[str], folder: str) -> dict[str, Any]:
    """The JSON that ``perfguard`` prints for ``words`` in ``folder``.

    Raises:
        ToolError: with what it printed on stderr, if it has no answer.
    """
    command = [sys.executable, "-m", "perfguard.cli", *words]
    try:
        ended = await anyio.run_process(command, cwd=folder, check=False, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise ToolError(f"The folder {folder!r} cannot be used: {error}") from error
    if not ended.stdout or ended.returncode not in _ANSWERED:
        raise ToolError(ended.stderr.decode(errors="replace").strip() or f"perfguard ended with status {ended.returncode}.")
    answer: dict[str, Any] = json.loads(ended.stdout)
    return answer


def serve(words: Sequence[str]) -> None:
    """Serve on standard input and output until the client closes them: the command ``perfguard mcp``."""
    parser = argparse.ArgumentParser(
        prog="perfguard mcp", description="Serve check, dry_run and list_gpus by the Model Context Protocol, on stdin and stdout."
    )
    parser.parse_args(words)
    server.run()
