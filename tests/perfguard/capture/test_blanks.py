"""No tensor that is too large for the host has data in a dry run. What cannot fit is judged by its bytes, not by a crash."""

from __future__ import annotations

import copy
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfguard.capture import blanks as module
from perfguard.capture.blanks import Blanks, zeros_on_host
from perfguard.capture.trial import capture, watching
from perfguard.devices import resolve_device
from perfguard.exceptions import TooLargeError
from perfguard.graph.op import StorageKind
from perfguard.workload import CapturedTrial

A100, CPU = resolve_device("a100"), resolve_device("cpu")
GIB = 2**30
HUGE = 500_000_000
"""Rows of 256 numbers, of which no machine that runs these tests holds all: 477 GiB."""
Run = Callable[[], object]


def step(model: nn.Module, x: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor] = torch.sum) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()


def taken_bytes(run: Run) -> int:
    """Return how far the resident memory of this process grows while ``run`` runs."""
    before = psutil.Process().memory_info().rss
    run()
    return int(psutil.Process().memory_info().rss) - before


def captured(run: Run, device: Any = A100, **settings: Any) -> CapturedTrial:
    """Return what a dry run shows whose host has 8 GiB free."""
    found: list[CapturedTrial] = []
    blanks = Blanks(**{"available_bytes": 8 * GIB, **settings})
    assert taken_bytes(lambda: found.append(capture(run, device, blanks=blanks))) < GIB
    return found[0]


def bytes_of(found: CapturedTrial, kind: StorageKind) -> int:
    return sum(storage.num_bytes for storage in found.graph.storages if storage.kind is kind)


@pytest.mark.parametrize("device", [A100, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize(
    ("make", "example"),
    [
        (lambda: nn.Linear(256, 200_000_000, bias=False), lambda: torch.zeros(2, 256)),
        (lambda: nn.Embedding(200_000_000, 256), lambda: torch.zeros(2, dtype=torch.long)),
        (lambda: nn.Sequential(*(nn.Linear(32_000, 32_000, bias=False) for _ in range(50))), lambda: torch.zeros(2, 32_000)),
    ],
    ids=["layer", "embedding", "many layers"],
)
def test_parameters_take_no_memory_before_they_move(make: Callable[[], nn.Module], example: Run, device: Any) -> None:
    where = "cuda" if device is A100 else "cpu"
    found = captured(lambda: step(make().to(where), example().to(where)), device)  # type: ignore[attr-defined]
    assert bytes_of(found, StorageKind.PARAMETER) > 190 * GIB


def test_initialisation_of_a_parameter_before_it_is_one_is_not_computed() -> None:
    def run() -> None:
        model = nn.Linear(256, 4, bias=False)
        model.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(HUGE, 256)).mul_(0.02))
        step(model.cuda(), torch.zeros(2, 256, device="cuda"), lambda x: x[:, :4].sum())

    assert bytes_of(captured(run), StorageKind.PARAMETER) == 4 * HUGE * 256


def test_buffers_take_no_memory() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(256, 4)
            self.register_buffer("table", torch.randn(HUGE, 256))

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x + self.table[:2])  # type: ignore[index]

    found = captured(lambda: step(Model().cuda(), torch.zeros(2, 256, device="cuda")))
    assert bytes_of(found, StorageKind.BUFFER) >= 4 * HUGE * 256


MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: torch.empty(HUGE, 256),
    "zeros": lambda: torch.zeros(HUGE, 256),
    "full": lambda: torch.full((HUGE, 256), 2.0),
    "rand": lambda: torch.rand(HUGE, 256, generator=torch.Generator().manual_seed(0)),
    "normal": lambda: torch.normal(0.0, 1.0, (HUGE, 256)),
    "randint": lambda: torch.randint(0, 10, (HUGE, 256)).float(),
    "arange": lambda: torch.arange(0, HUGE * 256, dtype=torch.float32).view(HUGE, 256),
    "legacy": lambda: torch.FloatTensor(HUGE, 256).normal_(),
    "new": lambda: torch.ones(1).new_zeros(HUGE, 256),
    "like": lambda: torch.randn_like(torch.zeros(1).expand(HUGE, 256), memory_format=torch.contiguous_format),
    "cat": lambda: torch.cat([torch.randn(HUGE // 50, 256) for _ in range(50)]),
    "repeat": lambda: torch.randn(1, 256).repeat(HUGE, 1),
    "broadcast": lambda: torch.randn(HUGE // 100, 1) + torch.randn(100, 1, 256).expand(100, 1, 256).reshape(1, 25_600),
    "outer": lambda: torch.outer(torch.ones(HUGE // 100), torch.ones(25_600)),
    "one-hot": lambda: nn.functional.one_hot(torch.zeros(HUGE, dtype=torch.long), 256).float(),
    "gathered": lambda: torch.randn(10, 256)[torch.randint(0, 10, (HUGE,))],
    "from numpy": lambda: torch.from_numpy(np.broadcast_to(np.zeros(1, np.float64), (HUGE, 256)).view()).float(),
    "copied": lambda: torch.tensor(np.lib.stride_tricks.as_strided(np.zeros(1), (HUGE, 256), (0, 0)), dtype=torch.float32),
    "cloned": lambda: copy.deepcopy(torch.zeros(HUGE, 256)),
}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("name", MAKERS)
def test_data_of_the_whole_set_take_no_memory(name: str) -> None:
    """It is normalized on the host, and all of it moves to the device: the step needs it, so it is counted there."""

    def run() -> None:
        x = MAKERS[name]()
        x = (x - x.mean(0)) / x.std(0)
        x[::2] *= 2
        step(nn.Linear(x.shape[1], 4).cuda(), x.cuda())

    assert bytes_of(captured(run), StorageKind.INPUT) == 4 * HUGE * 256


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_of_data_without_data_are_as_large_as_they_would_be(shuffle: bool) -> None:
    def run() -> None:
        data = TensorDataset(torch.randn(HUGE, 256), torch.randint(0, 10, (HUGE,)))
        model = nn.Linear(256, 10).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in DataLoader(data, 32, shuffle=shuffle):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
            optimizer.step()

    found = captured(run)
    assert bytes_of(found, StorageKind.INPUT) == 32 * 256 * 4 + 32 * 8
    assert found.steps_per_epoch == HUGE // 32
    assert found.host_memory is not None
    assert found.host_memory.process_bytes > 4 * HUGE * 256, "the host of the real trial holds them"


def test_many_tensors_that_fit_one_by_one_do_not_end_the_dry_run() -> None:
    def run() -> None:
        images = [torch.ones(3, 256, 256) for _ in range(2000)]  # 1.5 GiB
        step(nn.Conv2d(3, 4, 3).cuda(), torch.stack(images[:4]).cuda())
        assert images[0][0, 0, 0] == 1, "what fits has its values"

    found = captured(run, available_bytes=GIB)
    assert bytes_of(found, StorageKind.INPUT) == 4 * 3 * 256 * 256 * 4


def test_evaluation_that_keeps_its_outputs_on_the_host_takes_no_memory() -> None:
    def run() -> None:
        model = nn.Linear(256, 100_000).cuda()
        step(model, torch.zeros(2, 256, device="cuda"))
        with torch.no_grad():
            outputs = [model(torch.zeros(10_000, 256, device="cuda")).cpu() for _ in range(10)]
        assert torch.cat(outputs).double().argmax(1).shape == (100_000,)

    assert "an evaluation" in captured(run).phases


def test_values_of_what_fits_are_as_they_are() -> None:
    """Labels, lengths and masks decide on shapes."""
    seen: list[Any] = []

    def run() -> None:
        labels = torch.randint(0, 10, (1_000_000,))
        seen.append((labels.clone().max().item(), labels.float().mean().item(), torch.arange(70_000).sum().item()))
        step(nn.Linear(4, 4).cuda(), torch.zeros(2, 4, device="cuda"))

    captured(run)
    assert seen[0][0] == 9
    assert 4 < seen[0][1] < 5
    assert seen[0][2] == 70_000 * 69_999 // 2


@pytest.mark.parametrize(("available", "is_blank"), [(8 * GIB, False), (4 * GIB, True)])
def test_share_of_the_free_memory_decides(available: int, is_blank: bool) -> None:
    with watching(A100, blanks=Blanks(available_bytes=available)) as watch:
        assert watch.host.blanks.has([torch.empty(3 * 2**26)]) is is_blank  # 768 MiB


def test_data_that_the_memory_of_a_cpu_cannot_hold_are_too_large() -> None:
    def run() -> None:
        rows = [torch.randn(HUGE // 100, 256) for _ in range(100)]
        step(nn.Linear(256, 4), rows[0][:4])

    with pytest.raises(TooLargeError, match="do not fit into the memory") as caught:
        captured(run, CPU)
    assert caught.value.num_bytes > CPU.memory_bytes


def test_tensor_beyond_all_addresses_is_too_large() -> None:
    with pytest.raises(TooLargeError) as caught:
        captured(lambda: torch.zeros(2**58))
    assert caught.value.num_bytes == 2**60


def test_process_without_address_space_prunes_by_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `ulimit -v`."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(TooLargeError, match=r"477 GiB does not fit .* Cannot allocate memory") as caught:
        captured(lambda: torch.zeros(HUGE, 256))
    assert caught.value.num_bytes == 4 * HUGE * 256


def test_zeros_have_the_dtype_and_take_no_page_before_they_are_written() -> None:
    for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.int64):
        found = zeros_on_host(torch.empty(2**33, dtype=dtype, device="meta"))
        assert taken_bytes(lambda found=found: found[:: 2**20].cpu()) < 2**26  # type: ignore[misc]
        assert (found.dtype, found.device.type, found.shape) == (dtype, "cpu", (2**33,))
    assert not found[:10].any()
    found[3] = 1
    assert found[:10].sum() == 1


def test_container_with_less_memory_than_its_host_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfguard.devices.detect.host_memory_bytes", lambda: 2**20)
    assert module.free_host_bytes() == 2**20
