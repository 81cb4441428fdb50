"""Whatever a file says, it is answered or refused within ten seconds of processor time and one GiB of memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from perfguard import load_predictor
from perfguard.devices import resolve_device
from perfguard.exceptions import OnnxError
from perfguard.onnx import graph_from_onnx
from tests.perfguard.onnx import hostile

SCRIPT = Path(hostile.__file__)
MOST_MIB = hostile.MOST_BYTES // 2**20


class Outcome(NamedTuple):
    seconds: float
    peak_mib: int
    text: str


def outcomes(names: Iterable[str], folder: Path) -> dict[str, Outcome]:
    """What the script says of each; a crash, a hang and a MemoryError leave the rest out."""
    command = [sys.executable, str(SCRIPT), str(folder), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    found = {name: Outcome(float(seconds), int(mib), text) for name, seconds, mib, text in rows}
    missing = [name for name in names if name not in found]
    assert not missing, f"no answer for {missing[0]!r} (exit {done.returncode}): {done.stderr[-2000:]}"
    return found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return outcomes(list(hostile.SMALL), tmp_path_factory.mktemp("small"))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", hostile.SMALL)
def test_small_file_neither_hangs_nor_fills_memory(name: str, small: dict[str, Outcome]) -> None:
    """Finding 5: 134 bytes hung the process, or took 13 GiB of memory."""
    seconds, peak_mib, text = small[name]
    assert seconds < hostile.LONGEST_S
    assert peak_mib < MOST_MIB
    assert text.startswith(("read: ", "refused: "))
    assert "\n" not in text


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_large_file_neither_hangs_nor_fills_memory(tmp_path: Path) -> None:
    """A million operators, names of 100 MB, two gigabytes of weights: each took a path whose cost grew with the square
    of its size, or made objects of two hundred bytes of every two in the file."""
    for name, (seconds, peak_mib, text) in outcomes(list(hostile.LARGE), tmp_path).items():
        assert seconds < hostile.LONGEST_S, name
        assert peak_mib < MOST_MIB, name
        assert text.startswith(("read: ", "refused: ")), name


def test_a_size_above_the_largest_is_called_that(small: dict[str, Outcome]) -> None:
    """(2147483648,) was "more than 2^40 elements"."""
    assert "of shape (2147483648,): 2147483648 is more than 2^31 - 1" in small["ConstantOfShape 2^31"].text


def test_loop_of_billion_trips_is_refused_by_name(small: dict[str, Outcome]) -> None:
    """It was answered with 37 us, 14 to 98."""
    assert "(Loop 'loop') is written out, and goes on after" in small["Loop of 10^9"].text
    assert "multiply by the number of trips" in small["Loop of 10^9"].text


@pytest.mark.parametrize("name", ["range 10^8", "range 10^9", "Expand 2^30", "Tile 2^30"])
def test_what_is_read_can_be_predicted(name: str, tmp_path: Path) -> None:
    """A hang in the replay or in the predictor would be a hang all the same."""
    path = tmp_path / "model.onnx"
    path.write_bytes(hostile.SMALL[name]().SerializeToString())
    prediction = load_predictor().predict(graph_from_onnx(path), resolve_device("a100"))
    assert prediction.step_time.median > 0


def test_a_refusal_is_one_line_whatever_the_names(tmp_path: Path) -> None:
    """A name in a file may hold line breaks and codes that move a terminal's cursor."""
    model = hostile.convolution(group=0)
    model.graph.node[0].name = "stem\n\x1b[2J" * 100
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(OnnxError) as caught:
        graph_from_onnx(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000
