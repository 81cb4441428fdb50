"""What a dry run shows of the memory of the host: the model before it moves, the workers of loaders, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfguard import Guard
from perfguard.capture.trial import capture
from perfguard.devices import resolve_device
from perfguard.exceptions import UnguardedTrialWarning
from perfguard.workload import CapturedTrial, HostMemory, Workload

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
A100 = resolve_device("a100")
SAMPLE = 4 * 1000 + 8
OWN = 10 * 2**20


def training(make_model: Callable[[], nn.Module] = lambda: nn.Linear(1000, 10).cuda(), **options: Any) -> Callable[[], None]:
    data = TensorDataset(torch.zeros(640, 1000), torch.zeros(640, dtype=torch.long))

    def train() -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for x, y in DataLoader(data, 32, **options):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
                optimizer.step()

    return train


def host(run: Callable[[], None]) -> HostMemory:
    found = capture(run, A100).host_memory
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("options", "workers", "batches"),
    [
        ({}, 0, 0),
        ({"pin_memory": True}, 0, 1),
        ({"num_workers": 4}, 4, 4 + 4 * 2),
        ({"num_workers": 4, "prefetch_factor": 3, "pin_memory": True}, 4, 4 + 4 * 3 + 1),
        ({"num_workers": 4, "prefetch_factor": 8, "persistent_workers": True}, 4, 4 + 20),  # an epoch has no more
    ],
)
def test_workers_and_their_batches_count(options: Any, workers: int, batches: int) -> None:
    found = host(training(**options))
    assert found.num_workers == workers
    assert found.workers_bytes == workers * OWN + batches * 32 * SAMPLE


def test_workers_of_two_loaders_count_together_only_if_they_last() -> None:
    def both(**options: Any) -> HostMemory:
        train, more = training(num_workers=2, **options), training(num_workers=1, **options)
        return host(lambda: (train(), more())[0])

    assert both().num_workers == 2
    assert both(persistent_workers=True).num_workers == 3


def test_model_counts_where_it_is_made_on_the_host() -> None:
    num_bytes = 4 * (1000 * 10 + 10)
    assert host(training()).model_bytes == num_bytes
    assert host(training(lambda: nn.Linear(1000, 10).to(torch.device("cuda")))).model_bytes == num_bytes
    assert host(training(lambda: nn.Linear(1000, 10, device="cuda").half().float())).model_bytes == 0


def test_data_of_the_trial_counts_as_the_process() -> None:
    def with_data() -> None:
        kept = torch.ones(2**28, dtype=torch.uint8)  # 256 MiB
        training()()
        assert kept.all()

    before = host(training()).process_bytes
    assert host(with_data).process_bytes >= before + 200 * 2**20  # this process may have had more before


def stepping(before_backward: Callable[[torch.Tensor], Any]) -> Callable[[], None]:
    def train() -> None:
        model = nn.Linear(1000, 1000).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            output = model(torch.zeros(64_000, 1000, device="cuda"))
            kept = before_backward(output)
            output.sum().backward()
            optimizer.step()
            del kept, output

    return train


def test_what_comes_back_from_the_device_counts_while_it_is_kept() -> None:
    size = 64_000 * 1000 * 4
    buffer = torch.empty(64_000, 1000)
    plain = host(stepping(lambda _: None)).process_bytes
    for before_backward in (lambda x: x.cpu(), buffer.copy_, lambda x: (x.cpu(), None)[1]):
        assert host(stepping(before_backward)).process_bytes - plain == pytest.approx(size, rel=0.1)


def test_activations_on_the_host_are_pinned_and_count() -> None:
    def train() -> None:
        model = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(12))).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                output = model(torch.zeros(16_000, 1000, device="cuda"))
            output.sum().backward()
            optimizer.step()

    found = capture(train, A100)
    layer = 16_000 * 1000 * 4
    assert found.graph.peak_live_bytes < 7 * layer, "activations do not stay on the device"
    assert found.host_memory is not None
    assert found.host_memory.process_bytes > host(training()).process_bytes + 11 * layer


def test_guard_prunes_for_the_host_and_says_what_needs_it() -> None:
    captured = capture(training(num_workers=4), A100)
    guard = Guard(A100, host_memory_budget="20MiB", log=False)
    verdict = guard.preview(captured)
    assert verdict.action == "prune"
    assert verdict.worst is not None
    assert verdict.worst.quantity == "host_memory"
    assert "of host memory (" in verdict.reason
    assert verdict.reason.endswith("of host memory are the process and its data")
    assert Guard(A100, host_memory_budget=0.9, log=False).preview(captured).action == "launch"


def test_sentence_names_the_largest_part() -> None:
    gib = 2**30
    assert str(HostMemory(gib, 0, 3 * gib, 8)).startswith("3.00 GiB of host memory are 8 workers of loaders")
    assert str(HostMemory(gib, 4 * gib, 3 * gib, 8)) == "4.00 GiB of host memory are a model that is made on the host"
    assert HostMemory(gib, 4 * gib, 3 * gib, 8).needed_bytes == 5 * gib


def test_described_workload_has_no_host() -> None:
    workload = Workload(nn.Linear(4, 2), (8, 4), mode="infer")
    with pytest.warns(UnguardedTrialWarning, match="host_memory_budget needs a dry run of the objective"):
        verdict = Guard(A100, host_memory_budget="1GiB", log=False).check(workload)
    assert [limit.quantity for limit in verdict.limits] == ["memory"]


def test_on_a_cpu_the_step_is_on_the_host_too() -> None:
    cpu = resolve_device("cpu")
    captured: CapturedTrial = capture(training(lambda: nn.Linear(1000, 10)), cpu)
    assert captured.host_memory is not None
    verdict = Guard(cpu, host_memory_budget=0.9, log=False).preview(captured)
    needed = captured.host_memory.needed_bytes + verdict.predicted["memory"].median
    assert verdict.predicted["host_memory"].median == pytest.approx(needed)
