"""The MCP server, asked by the protocol's own client."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

from perfguard.cli import main
from perfguard_mcp import server

TRAINING = """
import argparse, torch

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=64)
width = parser.parse_args().width
model = torch.nn.Linear(8, width).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(4, 8).cuda()).sum().backward()
    optimizer.step()
open("done", "w").close()
"""


def asked(tool: str, of: Any = server, **arguments: Any) -> Any:
    async def ask() -> Any:
        async with Client(of) as client:
            return await client.call_tool(tool, arguments)

    return asyncio.run(ask())


@pytest.fixture
def script(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "train.py").write_text(TRAINING)
    return {"script": "train.py", "gpu": "a100-sxm-80gb", "folder": str(tmp_path)}


def test_a_client_finds_the_tools_and_what_they_do() -> None:
    async def tools() -> Any:
        async with Client(server) as client:
            return (await client.list_tools()).tools

    found = {tool.name: tool for tool in asyncio.run(tools())}
    assert set(found) == {"check", "dry_run", "list_gpus"}
    assert all(tool.annotations.read_only_hint for tool in found.values())
    assert set(found["check"].input_schema["required"]) == {"script", "gpu", "folder"}


def test_a_script_is_checked_and_not_run(script: dict[str, str], tmp_path: Path) -> None:
    fits = asked("check", **script).structured_content
    assert (fits["result"], fits["steps"]) == ("fits", 4)
    too_large = asked("check", **script, arguments=["--width", str(2**33)]).structured_content
    assert too_large["result"] == "does not fit"
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_dry_run_has_the_numbers_of_the_command(script: dict[str, str]) -> None:
    found = asked("dry_run", **script, explain=True).structured_content
    assert found["peak_memory_bytes"]["low"] < found["peak_memory_bytes"]["median"] < found["peak_memory_bytes"]["high"]
    assert found["total_time_s"] is not None
    assert found["explain"]


def test_a_mistake_is_told_to_the_agent(script: dict[str, str]) -> None:
    wrong = asked("check", **script | {"gpu": "a1000"})
    assert wrong.is_error
    assert "a1000" in wrong.content[0].text
    nowhere = asked("check", **script | {"folder": "/no/such/folder"})
    assert nowhere.is_error
    assert "/no/such/folder" in nowhere.content[0].text


def test_gpus_are_listed() -> None:
    assert asked("list_gpus").structured_content["t4"] == "Tesla T4"


@pytest.mark.slow
def test_the_command_serves_on_standard_input_and_output(script: dict[str, str]) -> None:
    started = StdioServerParameters(command=sys.executable, args=["-m", "perfguard.cli", "mcp"])
    assert asked("check", started, **script).structured_content["result"] == "fits"


def test_the_command_takes_no_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["mcp", "train.py"])
    assert "unrecognized arguments: train.py" in capsys.readouterr().err


def test_without_the_package_the_pip_line_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "perfguard_mcp")
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    assert main(["mcp"]) == 2
    assert "pip install 'perfguard[mcp]'" in capsys.readouterr().err
