"""A dry run reads a few samples of each data set, and sees what it saw of all of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from perfguard.capture.few_samples import Budget, ReadOnce, Samples, copied, look_at
from perfguard.capture.trial import capture
from perfguard.devices import resolve_device
from perfguard.workload import CapturedTrial


@pytest.fixture(autouse=True)
def _few_objects_to_collect() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()


class Clock:
    """A clock that goes on by ``each`` second whenever a data set is read."""

    def __init__(self, each: float) -> None:
        self.now = 0.0
        self.each = each

    def __call__(self) -> float:
        return self.now

    def read(self, *samples: Any) -> Callable[[], list[Any]]:
        def get() -> list[Any]:
            self.now += self.each * len(samples)
            return [*samples]

        return get


def samples_of(seconds: float, read: Callable[[int], Any], *, is_stream: bool = False) -> tuple[Samples, int]:
    """Read samples until no more are to be read, 5,000 at most."""
    clock = Clock(seconds)
    samples = Samples(Budget(), clock)
    for number in range(5000):
        if not samples.must_read(is_stream=is_stream):
            return samples, number
        samples.read(clock.read(read(number)))
    return samples, 5000


@pytest.mark.parametrize(
    ("seconds", "read", "is_stream", "expected"),
    [
        pytest.param(1e-5, lambda number: number, False, 5000, id="quick_ones"),
        pytest.param(1e-3, lambda number: number, False, 250, id="a_quarter_of_a_second"),
        pytest.param(1e-2, lambda number: number, False, 32, id="the_first"),
        pytest.param(0.1, lambda number: number, False, 10, id="a_second"),
        pytest.param(5.0, lambda number: number, False, 1, id="at_least_one"),
        pytest.param(1e-2, lambda number: "a" * number, False, 100, id="that_differ"),
        pytest.param(1e-2, lambda number: number, True, 100, id="of_a_stream"),
        pytest.param(0.1, lambda number: torch.empty(3, device="meta"), False, 5000, id="on_the_device"),
        pytest.param(0.1, lambda number: iter(()), False, 5000, id="that_nobody_can_look_into"),
    ],
)
def test_number_of_samples_that_are_read(seconds: float, read: Callable[[int], Any], is_stream: bool, expected: int) -> None:
    assert samples_of(seconds, read, is_stream=is_stream)[1] == pytest.approx(expected, abs=1)


def test_samples_of_many_bytes_are_kept_up_to_a_limit() -> None:
    samples, _ = samples_of(0.01, lambda number: torch.zeros(2**25, dtype=torch.uint8).view(2, -1))
    given = {samples.again(number).data_ptr() for number in range(100)}
    assert len(given) == 8  # 32 MiB each


def test_a_copy_of_a_sample_shares_nothing_and_leaves_the_rest_of_its_data_behind() -> None:
    data = torch.arange(1000)
    texts = ["a"]
    twin = copied({"x": data[3:5], "text": texts})
    texts.append("b")
    data[3] = 0
    assert (twin["x"].tolist(), twin["text"], twin["x"].untyped_storage().nbytes()) == ([3, 4], ["a"], 16)


def test_what_a_sample_is_made_of_is_looked_into() -> None:
    from torch_geometric.data import Data

    graph = look_at(Data(x=torch.zeros(5, 3), edge_index=torch.zeros(2, 7, dtype=torch.long)))
    assert graph is not None
    assert graph.num_bytes == 5 * 3 * 4 + 2 * 7 * 8
    assert look_at([1, 2, 3]) == look_at([4, 5, 6]) != look_at([1, 2])
    assert look_at((1, lambda: 0)) is None


def test_each_sample_is_read_once_while_there_is_room() -> None:
    read: list[int] = []

    class Data:
        def __getitem__(self, index: int) -> torch.Tensor:
            read.append(index)
            return torch.zeros(100, dtype=torch.uint8)

    once = ReadOnce(Data(), 250)
    for index in (0, 1, 0, 2, 2, 1):
        assert len(once[index]) == 100
    assert read == [0, 1, 2, 2]


def test_samples_are_read_anew_where_their_data_set_was_changed() -> None:
    samples, _ = samples_of(0.01, lambda number: torch.zeros(3))
    samples.look_again(lambda: [torch.zeros(3)])
    assert not samples.must_read()
    samples.look_again(lambda: [torch.zeros(4)])
    assert samples.must_read()
    assert not samples.has_any


def test_a_batch_that_is_given_again_has_containers_of_its_own() -> None:
    samples, _ = samples_of(0.01, lambda number: torch.zeros(3))
    first: dict[str, Any] = {"x": torch.zeros(2, 3), "names": ["a"]}
    samples.note_batch("key", first)
    for batch in (first, samples.batch_again("key")):
        batch.pop("x").unsqueeze_(0)
        batch["names"].clear()
        again = samples.batch_again("key")
        assert (again["names"], again["x"].shape) == (["a"], (2, 3))
    assert samples.batch_again("other") is None
    samples.note_batch("other", torch.zeros(3, device="meta"))
    assert samples.batch_again("other") is None


# --- In a dry run ---------------------------------------------------------------------------------------------------------------


class Images(Dataset[Any]):
    """Images and labels that take ``seconds`` each to be read."""

    def __init__(self, number: int = 400, seconds: float = 0.0) -> None:
        self.number = number
        self.seconds = seconds
        self.num_read = 0

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Any:
        self.num_read += 1
        time.sleep(self.seconds)
        return torch.full((3, 8, 8), float(index)), index % 10


class Stream(IterableDataset[Any]):
    """The same, one after the other."""

    def __init__(self, data: Images, *, has_length: bool) -> None:
        self.data = data
        if has_length:
            self.__class__ = _LongStream

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(len(self.data)))


class _LongStream(Stream):
    def __len__(self) -> int:
        return len(self.data)


class Together(Images):
    """Texts that are padded to the longest of those that are read together."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        length = 4 + max(indices) % 5
        return [(torch.full((length, 8), float(self[index][1])), index % 10) for index in indices]


def trained(loader: Any, epochs: int = 3, size: int = 8) -> CapturedTrial:
    """A dry run of an objective that trains with the batches of ``loader``."""

    def objective() -> None:
        model = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.Linear(16, 10)).cuda()
        model(torch.zeros(2, size, device="cuda"))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x.cuda().flatten(2).mean(1)[:, :size]), y.cuda()).backward()
                optimizer.step()

    return capture(objective, resolve_device("a100"))


def changed(samples: Any) -> Any:
    """Make a batch of samples that are changed."""
    for x, _ in samples:
        x.add_(1)
    return torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])


KINDS: dict[str, Callable[[Images], Any]] = {
    "table": lambda data: DataLoader(data, 48, shuffle=True),
    "last_one_dropped": lambda data: DataLoader(data, 48, drop_last=True),
    "subset": lambda data: DataLoader(Subset(data, range(300)), 48, num_workers=2),
    "collated": lambda data: DataLoader(data, 48, collate_fn=changed),
    "sampled": lambda data: DataLoader(data, batch_sampler=[[*range(begin, begin + 25)] for begin in range(0, 400, 25)]),
    "stream_with_a_length": lambda data: DataLoader(Stream(data, has_length=True), 48),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_data_set_shows_what_a_quick_one_does(kind: str) -> None:
    data = Images(seconds=0.01)
    slow, quick = trained(KINDS[kind](data)), trained(KINDS[kind](Images()))
    assert slow.graph.content_hash == quick.graph.content_hash
    assert (slow.steps, slow.steps_per_epoch, slow.samples_per_step) == (
        quick.steps,
        quick.steps_per_epoch,
        quick.samples_per_step,
    )
    assert slow.phases.keys() == quick.phases.keys()
    assert data.num_read <= (
        102 if "stream" in kind else 50
    )  # of which 16 are looked at for the longest, and one in each later epoch


def test_samples_that_are_read_together_are_given_again_together() -> None:
    data = Together(seconds=0.01)
    found = trained(DataLoader(data, 48))
    assert (found.steps, found.unseen, data.num_read) == (27, "", 48)


def test_a_stream_without_an_end_of_its_own_repeats_itself_until_it_is_cut() -> None:
    data = Images(1_000_000, seconds=0.01)
    found = trained(DataLoader(Stream(data, has_length=False), 48))
    assert found.samples_per_step == 48
    assert data.num_read <= 102


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_images_that_grow_between_epochs_are_seen(seconds: float) -> None:
    class Growing(Images):
        size = 8

        def __getitem__(self, index: int) -> Any:
            _, label = super().__getitem__(index)
            return torch.zeros(3, self.size, self.size), label

    def objective() -> None:
        model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        data = Growing(seconds=seconds)
        for epoch in range(12):
            data.size = 64 if epoch == 9 else 8
            for x, y in DataLoader(data, 48):
                optimizer.zero_grad()
                F.cross_entropy(model(x.cuda()), y.cuda()).backward()
                optimizer.step()

    found = capture(objective, resolve_device("a100"))
    assert "a later step" in found.phases
    assert found.steps == 12 * 9


def test_a_loop_that_works_out_something_of_the_data_gets_all_of_them() -> None:
    classes: set[int] = set()

    def objective() -> None:
        loader = DataLoader(Images(number=120, seconds=0.01), 8)
        for _, y in loader:
            classes.update((y + 100 * 0).tolist())
        model = nn.Linear(192, len(classes)).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for x, y in loader:
            F.cross_entropy(model(x.cuda().flatten(1)), y.cuda()).backward()
            optimizer.step()

    class_of = Images.__getitem__
    try:
        Images.__getitem__ = lambda self, index: (class_of(self, index)[0], index)  # type: ignore[method-assign]
        found = capture(objective, resolve_device("a100"))
    finally:
        Images.__getitem__ = class_of  # type: ignore[method-assign]
    assert (len(classes), found.steps) == (120, 15)


def test_data_on_the_device_are_not_kept() -> None:
    def objective() -> None:
        model = nn.Linear(192, 10).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            data = TensorDataset(torch.zeros(400, 192, device="cuda"), torch.zeros(400, dtype=torch.long, device="cuda"))
            for x, y in DataLoader(data, 40):
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            del data

    data_bytes = 400 * (192 * 4 + 8)
    assert data_bytes < capture(objective, resolve_device("a100")).graph.peak_live_bytes < 2 * data_bytes


class _Hostile(TensorDataset):
    __hash__ = TensorDataset.__hash__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("data sets of this class cannot be compared")


@pytest.mark.parametrize(
    "make", [lambda: torch.randn(400, 192), lambda: _Hostile(torch.randn(400, 192)), lambda: [*torch.randn(400, 192)]]
)
def test_data_sets_are_told_apart_without_being_compared(make: Callable[[], Any]) -> None:
    def objective() -> None:
        model = nn.Linear(192, 10)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            for loader in (DataLoader(make(), 40), DataLoader(make(), 40)):
                for batch in loader:
                    inputs = batch[0] if isinstance(batch, list) else batch
                    model(inputs).square().mean().backward()
                    optimizer.step()

    assert capture(objective, resolve_device("cpu")).steps == 40
