"""Programs whose habit is how batches are made: collators, samplers, workers, streams, memories and rounds of data."""
# ruff: noqa: PLW2901 - as users write it

from __future__ import annotations

import bisect
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, default_collate


class _Sentences(Dataset[Any]):
    """Texts of 4 to 40 words."""

    def __init__(self, number: int) -> None:
        generator = random.Random(0)
        self.texts = [torch.randint(1, 200, (generator.randrange(4, 41),)) for _ in range(number)]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.texts[index], index % 3


class _BucketSampler(Sampler[list[int]]):
    """Batches of texts of nearly equal length, in an order of their own."""

    def __init__(self, lengths: list[int], batch_size: int) -> None:
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batches = [order[at : at + batch_size] for at in range(0, len(order), batch_size)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        random.shuffle(self.batches)
        return iter(self.batches)


def _padded(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    texts, labels = zip(*samples, strict=True)
    return pad_sequence(list(texts), batch_first=True), torch.tensor(labels)


def buckets_of_length() -> None:
    """A sampler of batches by length, and a collator that pads to the longest text of each."""
    data = _Sentences(256)
    loader = DataLoader(data, batch_sampler=_BucketSampler([len(text) for text in data.texts], 16), collate_fn=_padded)
    embedding, head = (
        nn.Embedding(200, 32, padding_idx=0).cuda(),
        nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 3)).cuda(),
    )
    optimizer = torch.optim.Adam([*embedding.parameters(), *head.parameters()])
    for _epoch in range(2):
        for text, label in loader:
            text, label = text.cuda(), label.cuda()
            mask = (text != 0).unsqueeze(2)
            mean = (embedding(text) * mask).sum(1) / mask.sum(1)
            loss = F.cross_entropy(head(mean), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class _Offsets(NamedTuple):
    """A batch of texts one after the other."""

    text: torch.Tensor
    offsets: torch.Tensor
    label: torch.Tensor


def _one_after_the_other(samples: list[tuple[torch.Tensor, int]]) -> _Offsets:
    texts, labels = zip(*samples, strict=True)
    offsets = torch.tensor([0, *(len(text) for text in texts[:-1])]).cumsum(0)
    return _Offsets(torch.cat(texts), offsets, torch.tensor(labels))


def bags_of_words() -> None:
    """A bag of embeddings with offsets, clipped gradients, and a rate that falls when the accuracy does."""
    texts = [torch.randint(1, 500, (20,)) for _ in range(256)]
    data = [(text, at % 4) for at, text in enumerate(texts)]
    loader: Any = DataLoader(data, 16, shuffle=True, collate_fn=_one_after_the_other)  # type: ignore[arg-type]
    bag, head = nn.EmbeddingBag(500, 64).cuda(), nn.Linear(64, 4).cuda()
    parameters = [*bag.parameters(), *head.parameters()]
    optimizer = torch.optim.SGD(parameters, 5.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    for _epoch in range(3):
        for text, offsets, label in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(head(bag(text.cuda(), offsets.cuda())), label.cuda())
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 0.1)
            optimizer.step()
        scheduler.step()


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(200, 24, padding_idx=0), nn.Linear(48, 3)
        self.of_word, self.of_state = nn.Linear(24, 48), nn.Linear(48, 48)

    def forward(self, text: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.embedding(text), lengths, batch_first=True, enforce_sorted=False)
        words = self.of_word(packed.data).split(packed.batch_sizes.tolist())
        state, states = text.new_zeros(len(text), 48, dtype=torch.float32), []
        for word in words:  # the texts that go on are the first ones
            state = torch.tanh(word + self.of_state(state[: len(word)]))
            states.append(state)
        out, _ = pad_packed_sequence(packed._replace(data=torch.cat(states)), batch_first=True)
        logits: torch.Tensor = self.head(out.max(1).values)
        return logits


def packed_sentences() -> None:
    """A recurrent network of the program's own over packed texts, whose lengths stay on the host."""

    def collate(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        text, label = _padded(samples)
        return text, torch.tensor([len(one) for one, _ in samples]), label

    model = _Recurrent().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _epoch in range(8):
        for text, lengths, label in DataLoader(_Sentences(64), 64, collate_fn=collate):
            optimizer.zero_grad()
            F.cross_entropy(model(text.cuda(), lengths), label.cuda()).backward()
            optimizer.step()


class _Stream(IterableDataset[Any]):
    """Lines that are parsed as they come. Nobody says how many there are."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[Any]:
        for at in range(self.number):
            line = f"{at % 3}," + ",".join(str(at + column) for column in range(12))
            label, *values = line.split(",")
            yield torch.tensor([float(value) for value in values]), int(label)


def stream_of_lines() -> None:
    """An iterable data set without a length, read by workers' rules in one process."""
    model = nn.Sequential(nn.Linear(12, 128), nn.Tanh(), nn.Linear(128, 3)).cuda()
    optimizer = torch.optim.Adagrad(model.parameters())
    loader = DataLoader(_Stream(160), batch_size=16)
    for _epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.cuda()), y.cuda()).backward()
            optimizer.step()


class _Augmented(Dataset[Any]):
    def __init__(self, number: int) -> None:
        self.images = torch.randint(0, 256, (number, 3, 20, 20), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index].float().div(255)
        top, left = random.randrange(5), random.randrange(5)
        image = image[:, top : top + 16, left : left + 16]
        return (image.flip(-1) if random.random() < 0.5 else image), index % 10


def workers_and_pinned_memory() -> None:
    """Crops and flips in two workers that stay, a last batch that is dropped, copies that do not wait, and channels last."""

    def seeded(worker: int) -> None:
        random.seed(worker)

    loader = DataLoader(
        _Augmented(170), 16, shuffle=True, num_workers=2, pin_memory=True, drop_last=True, persistent_workers=True,
        prefetch_factor=2, worker_init_fn=seeded, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    model = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 10))
    model = model.to("cuda").to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    for _epoch in range(2):
        for x, y in loader:
            x = x.to("cuda", non_blocking=True, memory_format=torch.channels_last)
            y = y.to("cuda", non_blocking=True)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()


def mixed_in_the_collator() -> None:
    """Pairs of samples are mixed as a batch is made; labels are shares of classes."""
    data = TensorDataset(torch.randn(160, 32), torch.arange(160) % 5)

    def mixed(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = default_collate(samples)
        share, order = random.betavariate(0.4, 0.4), torch.randperm(len(x))
        labels = F.one_hot(y, 5).float()
        return share * x + (1 - share) * x[order], share * labels + (1 - share) * labels[order]

    model = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 5)).cuda()
    optimizer = torch.optim.NAdam(model.parameters())
    for _epoch in range(2):
        for x, y in DataLoader(data, 16, shuffle=True, collate_fn=mixed):
            optimizer.zero_grad()
            F.cross_entropy(model(x.cuda()), y.cuda()).backward()
            optimizer.step()


class _Windows(Dataset[Any]):
    """Windows of a series with what follows each, by a stride."""

    def __init__(self, series: torch.Tensor, length: int, horizon: int, stride: int = 1) -> None:
        self.series, self.length, self.horizon, self.stride = series, length, horizon, stride

    def __len__(self) -> int:
        return (len(self.series) - self.length - self.horizon) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.stride
        end = start + self.length
        return self.series[start:end].T, self.series[end : end + self.horizon, 0]


def windows_of_a_series() -> None:
    """Causal convolutions over windows, values scaled by the past alone, a forecast of several steps, a mean absolute error."""
    series = torch.randn(700, 3).cumsum(0)
    past, future = series[:500], series[500:]
    mean, std = past.mean(0), past.std(0)
    train, test = (_Windows((part - mean) / std, 48, 12, stride) for part, stride in ((past, 4), (future, 12)))
    layers: list[nn.Module] = []
    for at, channels in enumerate((3, 16, 16)):
        layers += [nn.ConstantPad1d((2**at * 2, 0), 0.0), nn.Conv1d(channels, 16, 3, dilation=2**at), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 48, 12)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    for _epoch in range(3):
        model.train()
        for x, y in DataLoader(train, 16, shuffle=True):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x.cuda()), y.cuda())
            loss.backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        errors = []
        with torch.inference_mode():
            for x, y in DataLoader(test, 32):
                errors.append((model(x.cuda()).cpu() - y).abs().mean().item())


class _Transition(NamedTuple):
    state: list[float]
    action: int
    reward: float
    following: list[float]
    is_end: bool


class _Game:
    """A walk on a line of four numbers that ends after 25 moves."""

    def reset(self) -> list[float]:
        self.moves = 0
        self.state = [random.gauss(0, 1) for _ in range(4)]
        return self.state

    def step(self, action: int) -> tuple[list[float], float, bool]:
        self.moves += 1
        self.state = [value + (0.1 if action else -0.1) for value in self.state]
        return self.state, -abs(self.state[0]), self.moves == 25


def replay_of_a_game() -> None:
    """Moves by chance or by the network, a memory on the host, and a step after each move once the memory has a batch."""
    policy, target = (nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2)).cuda() for _ in range(2))
    target.load_state_dict(policy.state_dict())
    optimizer, memory, game = torch.optim.Adam(policy.parameters()), deque[_Transition](maxlen=500), _Game()
    moves = 0
    for _episode in range(4):
        state, is_end = game.reset(), False
        while not is_end:
            moves += 1
            if random.random() < max(0.05, 1 - moves / 50):
                action = random.randrange(2)
            else:
                with torch.no_grad():
                    action = int(policy(torch.tensor([state], device="cuda")).argmax(1).item())
            following, reward, is_end = game.step(action)
            memory.append(_Transition(state, action, reward, following, is_end))
            state = following
            if len(memory) < 32:
                continue
            batch = _Transition(*zip(*random.sample(memory, 32), strict=True))  # type: ignore[arg-type]
            states, followings = (torch.tensor(part, device="cuda") for part in (batch.state, batch.following))
            rewards = torch.tensor(batch.reward, device="cuda")
            goes_on = 1 - torch.tensor(batch.is_end, device="cuda").float()
            values = policy(states).gather(1, torch.tensor(batch.action, device="cuda")[:, None]).squeeze(1)
            with torch.no_grad():
                wanted = rewards + 0.99 * goes_on * target(followings).max(1).values
            loss = F.smooth_l1_loss(values, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), policy.parameters(), strict=True):
                    slow.mul_(0.995).add_(fast, alpha=0.005)


def rounds_of_labels() -> None:
    """Active learning: after each round the ten least certain samples of a pool are labelled, and join the training set."""
    x, y = torch.randn(120, 32), torch.arange(120) % 4
    known, pool = list(range(40)), list(range(40, 120))
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 4)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _round in range(3):
        model.train()
        for _epoch in range(2):
            for a, b in DataLoader(TensorDataset(x[known], y[known]), 10, shuffle=True):
                optimizer.zero_grad()
                F.cross_entropy(model(a.cuda()), b.cuda()).backward()
                optimizer.step()
        model.eval()
        scores = []
        with torch.no_grad():
            for (a,) in DataLoader(TensorDataset(x[pool]), 20):
                shares = model(a.cuda()).softmax(1)
                scores.append(-(shares * shares.clamp(min=1e-9).log()).sum(1).cpu())
        chosen = torch.cat(scores).topk(10).indices.tolist()
        known += [pool[at] for at in chosen]
        pool = [one for at, one in enumerate(pool) if at not in set(chosen)]


class _Balanced(Sampler[int]):
    """As many samples of each of two data sets that are joined."""

    def __init__(self, data: ConcatDataset[Any], number: int) -> None:
        self.ends, self.number = data.cumulative_sizes, number

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[int]:
        starts = [0, *self.ends]
        for at in range(self.number):
            source = at % len(self.ends)
            yield random.randrange(starts[source], starts[source + 1])


def two_sources_balanced() -> None:
    """A small and a large data set in equal parts, whose sampler says how long an epoch is."""
    joined: ConcatDataset[Any] = ConcatDataset(
        [TensorDataset(torch.randn(number, 16), torch.arange(number) % 2) for number in (30, 300)]
    )
    assert bisect.bisect(joined.cumulative_sizes, 29) == 0
    loader = DataLoader(joined, 20, sampler=_Balanced(joined, 200))
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _epoch in range(3):
        for x, y in loader:
            loss = F.binary_cross_entropy_with_logits(model(x.cuda()).squeeze(1), y.float().cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class _Prefetched:
    """Batches that are on the device before they are asked for."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        batches = iter(self.loader)
        following = [part.to("cuda", non_blocking=True) for part in next(batches)]
        for batch in batches:
            current, following = following, [part.to("cuda", non_blocking=True) for part in batch]
            yield tuple(current)
        yield tuple(following)


def prefetched_batches() -> None:
    """The next batch is copied to the device while the last one is computed."""
    loader = _Prefetched(DataLoader(TensorDataset(torch.randn(320, 256), torch.arange(320) % 4), 32))
    model = nn.Sequential(nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


PROGRAMS: dict[Callable[[], object], int | None] = {
    buckets_of_length: 32,
    bags_of_words: 48,
    packed_sentences: 8,
    stream_of_lines: 20,
    workers_and_pinned_memory: 20,
    mixed_in_the_collator: 20,
    windows_of_a_series: 21,
    replay_of_a_game: None,  # its moves are the network's, and a game may end by them
    rounds_of_labels: 30,
    two_sources_balanced: 30,
    prefetched_batches: 20,
}
"""The programs, with the steps that each makes. None: a value decides, so nobody knows them before."""
