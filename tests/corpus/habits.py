"""Programs for the habits around a training loop: accumulation, schedules, checkpoints, stopping, several parts and stages."""
# ruff: noqa: PLW2901 - as users write it

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

from tests.corpus.data import images, rows, tokens


def _net(width: int = 32, hidden: int = 128, out: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, out))


def two_batches_a_step() -> None:
    """The gradients of two batches are added up."""
    model = _net().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _epoch in range(2):
        optimizer.zero_grad()
        for at, (x, y) in enumerate(rows(320, 32)):
            loss = F.cross_entropy(model(x.cuda()), y.cuda()) / 2
            loss.backward()
            if (at + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()


def accumulation_of_many() -> None:
    """Sixteen micro-batches a step, the rest of an epoch in a step of its own."""
    model = _net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = rows(8 * 40, 8)
    for _epoch in range(2):
        for at, (x, y) in enumerate(loader, 1):
            (F.cross_entropy(model(x.cuda()), y.cuda()) / 16).backward()
            if at % 16 == 0 or at == len(loader):
                optimizer.step()
                optimizer.zero_grad()


def saved_each_epoch() -> None:
    """A checkpoint of model, optimizer and scheduler after each epoch, and the last one loaded at the end."""
    model = _net().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.pt"
        for epoch in range(3):
            for x, y in rows(160, 16):
                optimizer.zero_grad()
                F.cross_entropy(model(x.cuda()), y.cuda()).backward()
                optimizer.step()
            scheduler.step()
            states = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(states, path)
        model.load_state_dict(torch.load(path, map_location="cpu")["model"])


def stopped_early() -> None:
    """The best weights are kept, and training ends when nothing has improved for three epochs."""
    model = _net().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    best, lowest, waited = copy.deepcopy(model.state_dict()), float("inf"), 0
    for _epoch in range(30):
        for x, y in rows(160, 16):
            optimizer.zero_grad()
            F.cross_entropy(model(x.cuda()), y.cuda()).backward()
            optimizer.step()
        with torch.no_grad():
            value = sum(F.cross_entropy(model(x.cuda()), y.cuda()).item() for x, y in rows(64, 16))
        if value < lowest:
            lowest, waited, best = value, 0, copy.deepcopy(model.state_dict())
        else:
            waited += 1
            if waited >= 3:
                break
    model.load_state_dict(best)


def plateau_schedule() -> None:
    """A learning rate that falls when a validation does not improve."""
    model = _net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    for _epoch in range(3):
        model.train()
        for x, y in rows(160, 16):
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            losses = [F.cross_entropy(model(x.cuda()), y.cuda()).item() for x, y in rows(64, 32)]
        scheduler.step(sum(losses) / len(losses))


def warm_up_and_decay() -> None:
    """A schedule by step of two parts, and groups with and without weight decay."""
    model = _net().cuda()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 15)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], [5])
    for _epoch in range(2):
        for x, y in rows(160, 16):
            x, y = x.to("cuda", non_blocking=True), y.to("cuda", non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()


def folds_of_a_table() -> None:
    """Three folds, each with a model of its own, and a test of each."""
    data = TensorDataset(torch.randn(120, 32), torch.arange(120) % 4)
    for fold in range(3):
        held_out = [*range(fold * 40, fold * 40 + 40)]
        others = [at for at in range(120) if at not in set(held_out)]
        model = _net().cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _epoch in range(2):
            for x, y in DataLoader(Subset(data, others), 40, shuffle=True):
                optimizer.zero_grad()
                F.cross_entropy(model(x.cuda()), y.cuda()).backward()
                optimizer.step()
        with torch.no_grad():
            for x, _ in DataLoader(Subset(data, held_out), 40):
                model(x.cuda()).argmax(1).cpu()


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 128), nn.ReLU())
        self.kind, self.size = nn.Linear(128, 4), nn.Linear(128, 1)
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x)
        return self.kind(hidden), self.size(hidden)


def several_tasks() -> None:
    """Two heads whose losses are weighed by what the model learns of their noise."""
    model = _TwoHeads().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _epoch in range(2):
        for x, y in rows(160, 16):
            x, y = x.cuda(), y.cuda()
            kind, size = model(x)
            losses = torch.stack([F.cross_entropy(kind, y), F.l1_loss(size.squeeze(1), x.sum(1))])
            loss = (losses * torch.exp(-model.log_variances) + model.log_variances).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def curriculum() -> None:
    """Longer texts in each epoch, from a loader that is made anew."""
    model = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 100)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for length in (8, 16, 32):
        for x, y in tokens(160, 16, length=length):
            optimizer.zero_grad()
            F.cross_entropy(model(x.cuda()).flatten(0, 1), y.cuda().flatten()).backward()
            optimizer.step()


def unfrozen_later() -> None:
    """The head alone for an epoch, and then all, with another optimizer."""
    body, head = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()).cuda(), nn.Linear(256, 4).cuda()
    for parameter in body.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.Adam(head.parameters())
    for epoch in range(4):
        if epoch == 1:
            for parameter in body.parameters():
                parameter.requires_grad_(True)
            optimizer.add_param_group({"params": body.parameters(), "lr": 1e-4})
        for x, y in rows(160, 16):
            optimizer.zero_grad()
            F.cross_entropy(head(body(x.cuda())), y.cuda()).backward()
            optimizer.step()


def endless_loader() -> None:
    """A number of steps over a loader that begins again, with an evaluation every ten."""
    model = _net().cuda()
    optimizer = torch.optim.Adam(model.parameters())

    def forever(loader: DataLoader[Any]) -> Any:
        while True:
            yield from loader

    batches = forever(rows(160, 16))
    for step in range(45):
        x, y = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
        if step % 10 == 9:
            with torch.no_grad():
                for x, _ in rows(32, 16):
                    model(x.cuda()).argmax(1)


def rare_classes() -> None:
    """Samples drawn by weight, a focal loss."""
    data = TensorDataset(torch.randn(160, 32), torch.arange(160) % 4)
    loader = DataLoader(data, 16, sampler=WeightedRandomSampler([1.0] * 160, 160))
    model = _net().cuda()
    optimizer = torch.optim.RMSprop(model.parameters())
    for _epoch in range(2):
        for x, y in loader:
            loss = F.cross_entropy(model(x.cuda()), y.cuda(), reduction="none")
            loss = ((1 - torch.exp(-loss)) ** 2 * loss).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def two_loaders() -> None:
    """Labelled batches beside unlabelled ones, whose own confident answers are their labels."""
    model = _net().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _epoch in range(2):
        for (x, y), (other, _) in zip(itertools.cycle(rows(32, 16)), rows(320, 32), strict=False):
            x, y, other = x.cuda(), y.cuda(), other.cuda()
            with torch.no_grad():
                answers = model(other).softmax(1)
                sure, labels = answers.max(1)
            strong = model(other + 0.1 * torch.randn_like(other))
            loss = F.cross_entropy(model(x), y)
            loss = loss + (F.cross_entropy(strong, labels, reduction="none") * (sure > 0.9)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def sharpness_aware() -> None:
    """Two passes a step: weights move to where the loss is higher, and back."""
    model = _net().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _epoch in range(2):
        for x, y in rows(160, 16):
            x, y = x.cuda(), y.cuda()
            F.cross_entropy(model(x), y).backward()
            moved = []
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    moved.append(0.05 * parameter.grad)
                    parameter.add_(moved[-1])
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for parameter, change in zip(model.parameters(), moved, strict=True):
                    parameter.sub_(change)
            optimizer.step()
            optimizer.zero_grad()


def adversarial() -> None:
    """Inputs that a step along their gradient makes worse, beside clean ones."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10)
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _epoch in range(2):
        for x, y in images(160, 16):
            x, y = x.cuda(), y.cuda()
            worse = x.clone().requires_grad_(True)
            gradient = torch.autograd.grad(F.cross_entropy(model(worse), y), worse)[0]
            worse = (worse + 0.03 * gradient.sign()).detach()
            optimizer.zero_grad()
            F.cross_entropy(model(torch.cat([x, worse])), torch.cat([y, y])).backward()
            optimizer.step()


def random_search() -> None:
    """Three models in turn, each with another width, of which the best is kept on the host."""
    best: dict[str, torch.Tensor] = {}
    for hidden in (64, 256, 128):
        model = _net(hidden=hidden).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for x, y in rows(160, 16):
            optimizer.zero_grad()
            F.cross_entropy(model(x.cuda()), y.cuda()).backward()
            optimizer.step()
        best = {name: weight.cpu() for name, weight in model.state_dict().items()}
    assert best


PROGRAMS: dict[Callable[[], object], int | None] = {
    two_batches_a_step: 10,
    accumulation_of_many: 6,
    saved_each_epoch: 30,
    stopped_early: None,
    plateau_schedule: 30,
    warm_up_and_decay: 20,
    folds_of_a_table: 12,
    several_tasks: 20,
    curriculum: 30,
    unfrozen_later: 40,
    endless_loader: 45,
    rare_classes: 20,
    two_loaders: 20,
    sharpness_aware: 20,
    adversarial: 20,
    random_search: 30,
}
"""The programs, with the steps that each makes. None: a value decides, so nobody knows them before."""
