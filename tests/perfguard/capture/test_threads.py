"""An objective that trains in a thread of its own, for a limit of time for instance, is dry-run as one that does not."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfguard.capture.trial import capture
from perfguard.devices import resolve_device

A100 = resolve_device("a100")


def train() -> None:
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        for (x,) in DataLoader(TensorDataset(torch.randn(40, 64)), 10):
            model(x.cuda()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def _in_a_thread() -> None:
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()


def _in_an_executor() -> None:
    with ThreadPoolExecutor(1) as executor:
        executor.submit(train).result(timeout=100)


def _in_a_pool() -> None:
    with ThreadPool(1) as pool:
        pool.apply_async(train).get(timeout=100)


def _in_an_event_loop() -> None:
    async def run() -> None:
        await asyncio.to_thread(train)

    asyncio.run(run())


@pytest.mark.parametrize("objective", [_in_a_thread, _in_an_executor, _in_a_pool, _in_an_event_loop])
def test_training_in_a_thread_is_the_training_without_it(objective: Callable[[], None]) -> None:
    found, plain = capture(objective, A100), capture(train, A100)
    assert found.graph.ops == plain.graph.ops
    assert found.graph.storages == plain.graph.storages
    assert found.steps == plain.steps == 12


def test_a_thread_without_end_of_training_ends_a_dry_run_that_has_seen_enough() -> None:
    def step_always() -> None:
        model = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        while True:
            model(torch.randn(int(torch.randint(1, 100, ())), 64).cuda()).mean().backward()
            optimizer.step()

    def objective() -> None:
        with ThreadPoolExecutor(1) as executor:
            executor.submit(step_always).result(timeout=100)

    assert capture(objective, A100, replays=False).steps is None


def test_a_thread_that_makes_batches_leaves_the_step_as_it_is() -> None:
    def objective() -> None:
        batches: queue.Queue[torch.Tensor] = queue.Queue(4)

        def fill() -> None:
            for _ in range(6):
                batches.put(torch.randn(10, 64).exp())

        thread = threading.Thread(target=fill)
        thread.start()
        model = nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(6):
            model(batches.get().cuda()).square().mean().backward()
            optimizer.step()
        thread.join()

    assert capture(objective, A100).steps == 6
