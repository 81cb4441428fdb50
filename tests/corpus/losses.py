"""Programs whose habit is the loss: adversaries, banks of negatives, mined triplets, flows, energies, equations over time."""
# ruff: noqa: PLW2901 - as users write it

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from tests.corpus.data import images, rows, tokens


def _adversaries(noise: int = 8, width: int = 32) -> tuple[nn.Module, nn.Module]:
    make = nn.Sequential(nn.Linear(noise, 64), nn.ReLU(), nn.Linear(64, width))
    judge = nn.Sequential(nn.Linear(width, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    return make.cuda(), judge.cuda()


def adversaries_in_folds() -> None:
    """A pair of networks in each fold, whose optimizers are made anew, with soft labels and a classifier of samples after it."""
    data = TensorDataset(torch.randn(96, 32), torch.arange(96) % 2)
    for fold in range(3):
        chosen = [at for at in range(96) if at % 3 != fold]
        make, judge = _adversaries()
        of_make = torch.optim.Adam(make.parameters(), 2e-4, betas=(0.5, 0.999))
        of_judge = torch.optim.Adam(judge.parameters(), 2e-4, betas=(0.5, 0.999))
        for _epoch in range(2):
            for real, _ in DataLoader(Subset(data, chosen), 16, shuffle=True):
                real = real.cuda()
                fake = make(torch.randn(len(real), 8, device="cuda"))
                right, wrong = (torch.full((len(real), 1), share, device="cuda") for share in (0.9, 0.0))
                loss = F.binary_cross_entropy_with_logits(judge(real), right)
                loss = loss + F.binary_cross_entropy_with_logits(judge(fake.detach()), wrong)
                of_judge.zero_grad()
                loss.backward()
                of_judge.step()
                of_make.zero_grad()
                F.binary_cross_entropy_with_logits(judge(fake), torch.ones_like(right)).backward()
                of_make.step()


def critic_of_five_steps() -> None:
    """A critic that makes five steps for one of the generator, with weights that are clamped."""
    make, judge = _adversaries()
    of_make, of_judge = torch.optim.RMSprop(make.parameters(), 5e-5), torch.optim.RMSprop(judge.parameters(), 5e-5)
    for _epoch in range(2):
        for at, (real, _) in enumerate(rows(320, 16)):
            real = real.cuda()
            of_judge.zero_grad()
            with torch.no_grad():
                fake = make(torch.randn(len(real), 8, device="cuda"))
            (judge(fake).mean() - judge(real).mean()).backward()
            of_judge.step()
            for parameter in judge.parameters():
                parameter.data.clamp_(-0.01, 0.01)
            if at % 5 == 4:
                of_make.zero_grad()
                (-judge(make(torch.randn(len(real), 8, device="cuda"))).mean()).backward()
                of_make.step()


class _Pool:
    """Up to 24 images that were made before, of which half are given in the place of new ones."""

    def __init__(self) -> None:
        self.images: list[torch.Tensor] = []

    def query(self, batch: torch.Tensor) -> torch.Tensor:
        given = []
        for image in batch:
            image = image[None].clone()
            if len(self.images) < 24:
                self.images.append(image)
                given.append(image)
            elif random.random() > 0.5:
                at = random.randrange(24)
                given.append(self.images[at].clone())
                self.images[at] = image
            else:
                given.append(image)
        return torch.cat(given)


def there_and_back() -> None:
    """Images of two kinds without pairs: there and back again, one optimizer for both ways, and a pool of older images."""
    there, back = (nn.Conv2d(3, 3, 3, padding=1).cuda() for _ in range(2))
    judge = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 1)).cuda()
    of_ways = torch.optim.Adam(itertools.chain(there.parameters(), back.parameters()), 2e-4)
    of_judge = torch.optim.Adam(judge.parameters(), 2e-4)
    pool = _Pool()
    for _epoch in range(2):
        for (a, _), (b, _) in zip(images(96, 4), images(96, 4), strict=True):
            a, b = a.cuda(), b.cuda()
            fake = there(a)
            score = judge(fake)
            loss = F.mse_loss(score, torch.ones_like(score))
            loss = loss + 10 * F.l1_loss(back(fake), a) + 5 * F.l1_loss(there(b), b)
            of_ways.zero_grad()
            loss.backward()
            of_ways.step()
            old = pool.query(fake.detach())
            right, wrong = judge(b), judge(old)
            loss = (F.mse_loss(right, torch.ones_like(right)) + F.mse_loss(wrong, torch.zeros_like(wrong))) / 2
            of_judge.zero_grad()
            loss.backward()
            of_judge.step()


class _Numbered(Dataset[Any]):
    def __init__(self, number: int) -> None:
        self.images = torch.randn(number, 3, 16, 16)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], index


def bank_of_all_samples() -> None:
    """A vector of each sample of the data in a bank, which is drawn from for negatives and follows the network."""
    data = _Numbered(160)
    body = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 32)).cuda()
    bank = F.normalize(torch.randn(len(data), 32, device="cuda"), dim=1)
    optimizer = torch.optim.SGD(body.parameters(), 0.03, momentum=0.9, weight_decay=5e-4)
    for _epoch in range(2):
        for x, number in DataLoader(data, 16, shuffle=True):
            x, number = x.cuda(), number.cuda()
            vector = F.normalize(body(x), dim=1)
            others = torch.randint(0, len(data), (len(x), 64), device="cuda")
            candidates = bank[torch.cat([number[:, None], others], 1)]
            logits = torch.einsum("nd,nkd->nk", vector, candidates) / 0.07
            loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long, device="cuda"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                bank[number] = F.normalize(0.5 * bank[number] + 0.5 * vector, dim=1)


def hardest_triplets() -> None:
    """For each sample the furthest of its class and the nearest of another, within a batch of a few classes."""
    body = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 16)).cuda()
    optimizer = torch.optim.AdamW(body.parameters())
    for _epoch in range(2):
        for x, y in rows(320, 32, classes=8):
            x, y = x.cuda(), y.cuda()
            vectors = body(x)
            distance = torch.cdist(vectors, vectors)
            is_same = y[:, None] == y[None, :]
            furthest = distance.masked_fill(~is_same, 0).max(1).values
            nearest = distance.masked_fill(is_same, float("inf")).min(1).values
            loss = F.relu(furthest - nearest + 0.3).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class _Coupling(nn.Module):
    def __init__(self, width: int, *, is_first: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width // 2, 64), nn.ReLU(), nn.Linear(64, width))
        self.is_first = is_first

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept, changed = x.chunk(2, 1) if self.is_first else reversed(x.chunk(2, 1))
        scale, shift = self.net(kept).chunk(2, 1)
        scale = torch.tanh(scale)
        changed = changed * scale.exp() + shift
        parts = (kept, changed) if self.is_first else (changed, kept)
        return torch.cat(parts, 1), scale.sum(1)


def normalizing_flow() -> None:
    """Couplings that can be inverted, the likelihood with the logarithm of the determinant, gradients checked for numbers."""
    flow = nn.ModuleList(_Coupling(32, is_first=at % 2 == 0) for at in range(4)).cuda()
    optimizer = torch.optim.Adam(flow.parameters(), 1e-3)
    for _epoch in range(2):
        for x, _ in rows(320, 32):
            z, total = x.cuda(), torch.zeros(len(x), device="cuda")
            for layer in flow:
                z, log_det = layer(z)
                total = total + log_det
            loss = -(-0.5 * (z**2 + math.log(2 * math.pi)).sum(1) + total).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(flow.parameters(), 1.0, error_if_nonfinite=False)
            optimizer.step()


def energies_of_samples() -> None:
    """An energy that is low for data and high for samples, which walk down its gradient."""
    energy = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.Adam(energy.parameters())
    for _epoch in range(2):
        for x, _ in rows(160, 16):
            x = x.cuda()
            walker = torch.randn_like(x)
            for _ in range(5):
                walker = walker.detach().requires_grad_(True)
                slope = torch.autograd.grad(energy(walker).sum(), walker)[0]
                walker = walker - 0.1 * slope + 0.01 * torch.randn_like(walker)
            loss = energy(x).mean() - energy(walker.detach()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class _Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, time: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(torch.cat([y, time.expand(len(y), 1)], 1))
        return out


def equation_over_time() -> None:
    """A differential equation whose slope is a network, solved by Runge and Kutta's method of fourth order with fixed steps."""
    slope = _Slope().cuda()
    optimizer = torch.optim.Adam(slope.parameters(), 1e-2)
    times = torch.linspace(0, 1, 6, device="cuda")
    start = torch.randn(32, 2).cuda()
    wanted = torch.stack([start * torch.exp(-at) for at in times])
    for _step in range(30):
        y, path = start, [start]
        for before, after in itertools.pairwise(times):
            h = after - before
            k1 = slope(before, y)
            k2 = slope(before + h / 2, y + h / 2 * k1)
            k3 = slope(before + h / 2, y + h / 2 * k2)
            k4 = slope(after, y + h * k3)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            path.append(y)
        loss = F.huber_loss(torch.stack(path), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class _Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(100, 32), nn.Embedding(100, 32)
        self.of_word, self.of_state, self.head = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(128, 100)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        state, memory = self.of_state.weight.new_zeros(len(source), 64), []
        for word in self.source(source).unbind(1):
            state = torch.tanh(self.of_word(word) + self.of_state(state))
            memory.append(state)
        keys, word, answers = torch.stack(memory, 1), target[:, 0], []
        for at in range(target.shape[1]):
            state = torch.tanh(self.of_word(self.target(word)) + self.of_state(state))
            share = (keys @ state[:, :, None]).softmax(1)
            answers.append(self.head(torch.cat([state, (share * keys).sum(1)], 1)))
            is_forced = random.random() < 0.5
            word = target[:, at] if is_forced else answers[-1].argmax(1)
        return torch.stack(answers, 1)


def teacher_forcing() -> None:
    """A text is read and another written, word by word, with attention; half of the words that are read are the network's own."""
    model = _Seq2Seq().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _epoch in range(2):
        for source, target in tokens(160, 16, length=10):
            source, target = source.cuda(), target.cuda()
            loss = F.cross_entropy(model(source, target).flatten(0, 1), target.flatten(), ignore_index=0)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1)
            optimizer.step()


class _Codes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(32, 16), nn.Linear(16, 32)
        self.book = nn.Parameter(torch.randn(64, 16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.encode(x)
        code = self.book[torch.cdist(z, self.book).argmin(1)]
        loss = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return self.decode(z + (code - z).detach()), loss


def book_of_codes() -> None:
    """An autoencoder whose middle is the nearest of 64 codes, with a gradient that goes straight through."""
    model = _Codes().cuda()
    optimizer = torch.optim.RAdam(model.parameters())
    for _epoch in range(2):
        for x, _ in rows(320, 32):
            x = x.cuda()
            made, of_codes = model(x)
            loss = F.mse_loss(made, x) + of_codes
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def sounds_as_spectrograms() -> None:
    """Waves become spectrograms on the device, parts of which are hidden, and convolutions say what they are."""
    classify = nn.Sequential(nn.Conv2d(1, 16, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 6)).cuda()
    window, bands = torch.hann_window(128).cuda(), torch.rand(24, 65).cuda()
    optimizer = torch.optim.AdamW(classify.parameters())
    data = TensorDataset(torch.randn(80, 2000), torch.arange(80) % 6)
    for _epoch in range(2):
        for wave, label in DataLoader(data, 8, shuffle=True):
            wave, label = wave.cuda(), label.cuda()
            power = torch.stft(wave, 128, 64, window=window, return_complex=True).abs().square()
            mel = (bands @ power + 1e-6).log()
            mel = (mel - mel.mean((1, 2), keepdim=True)) / mel.std((1, 2), keepdim=True)
            first = random.randrange(20)
            mel[:, first : first + 4] = 0
            loss = F.cross_entropy(classify(mel[:, None]), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def neighbours_of_neighbours() -> None:
    """Nodes in batches, with five neighbours of each and three of each of those, drawn on the host."""
    features, labels = torch.randn(500, 16), torch.randint(0, 4, (500,))
    neighbours = torch.randint(0, 500, (500, 20))
    first, second = nn.Linear(32, 64).cuda(), nn.Linear(128, 4).cuda()
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], 0.01)

    def drawn(nodes: torch.Tensor, number: int) -> torch.Tensor:
        return neighbours[nodes][..., torch.randperm(20)[:number]]

    for _epoch in range(2):
        for nodes in torch.randperm(500).split(50):
            near = drawn(nodes, 5)
            far = drawn(near, 3)
            x, x_near, x_far = (features[part].cuda() for part in (nodes, near, far))
            h_near = F.relu(first(torch.cat([x_near, x_far.mean(2)], 2)))
            h = F.relu(first(torch.cat([x, x_near.mean(1)], 1)))
            loss = F.cross_entropy(second(torch.cat([h, h_near.mean(1)], 1)), labels[nodes].cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


PROGRAMS: dict[Callable[[], object], int | None] = {
    adversaries_in_folds: 24,
    critic_of_five_steps: 8,  # a step is one of the generator, and five of the critic
    there_and_back: 48,
    bank_of_all_samples: 20,
    hardest_triplets: 20,
    normalizing_flow: 20,
    energies_of_samples: 20,
    equation_over_time: 30,
    teacher_forcing: 20,
    book_of_codes: 20,
    sounds_as_spectrograms: 20,
    neighbours_of_neighbours: 20,
}
"""The programs, with the steps that each makes."""
