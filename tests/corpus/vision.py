"""Programs that train on images, as public code does."""
# ruff: noqa: PLW2901 - as users write it

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.corpus.data import Pairs, images


def _small(classes: int = 10, channels: int = 3) -> nn.Sequential:
    layers = [
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes))


def mnist() -> None:
    """An example with a log-softmax, a scheduler, and a test after each epoch."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(_small(10, 1), nn.Dropout(0.25), nn.Linear(10, 10), nn.LogSoftmax(1)).to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    for _epoch in range(1, 4):
        model.train()
        for index, (data, target) in enumerate(images(320, 32, channels=1)):
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            if index % 5 == 0:
                str(loss.item())
        model.eval()
        correct = 0
        with torch.no_grad():
            for data, target in images(128, 64, channels=1):
                correct += model(data.to(device)).argmax(1).eq(target.to(device)).sum().item()
        scheduler.step()


def transfer_learning() -> None:
    """Two phases an epoch, and the best weights by accuracy."""
    model = _small().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    best, best_weights = 0.0, copy.deepcopy(model.state_dict())
    for _epoch in range(3):
        for phase in ("train", "val"):
            model.train(phase == "train")
            right = torch.zeros((), device="cuda")
            for x, y in images(160, 32):
                x, y = x.cuda(), y.cuda()
                optimizer.zero_grad()
                with torch.set_grad_enabled(phase == "train"):
                    output = model(x)
                    if phase == "train":
                        F.cross_entropy(output, y).backward()
                        optimizer.step()
                right += (output.argmax(1) == y).sum()
            if phase == "val" and right.item() > best:
                best, best_weights = right.item(), copy.deepcopy(model.state_dict())
    model.load_state_dict(best_weights)


def average_and_mixup() -> None:
    """An exponential moving average of the weights, mixed images, a cosine with restarts, clipped gradients."""
    model = _small().cuda()
    average = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
    for _epoch in range(4):
        for x, y in images(256, 32):
            x, y = x.cuda(), F.one_hot(y.cuda(), 10).float()
            share = 0.3
            x, y = share * x + (1 - share) * x.flip(0), share * y + (1 - share) * y.flip(0)
            loss = torch.sum(-y * F.log_softmax(model(x), -1), -1).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                for mean, value in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
                    mean.copy_(0.99 * mean + 0.01 * value)
        scheduler.step()


def stochastic_weight_averaging() -> None:
    """An averaged model from the third epoch on, and its batch norms anew at the end."""
    model = _small().cuda()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)
    loader = images(160, 32)
    for epoch in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.cuda()), y.cuda()).backward()
            optimizer.step()
        if epoch >= 2:
            averaged.update_parameters(model)
            scheduler.step()
    torch.optim.swa_utils.update_bn(loader, averaged, device=torch.device("cuda"))


class _Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = _small(32)
        self.head = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> Any:
        return self.head(torch.cat([self.body(one), self.body(other)], 1))


def siamese() -> None:
    """A network with two inputs, and a binary cross-entropy."""
    model = _Siamese().to("cuda")
    optimizer = torch.optim.Adadelta(model.parameters())
    for _epoch in range(2):
        for one, other in torch.utils.data.DataLoader(Pairs(160), 16):
            target = torch.ones(len(one)).to("cuda")
            optimizer.zero_grad()
            F.binary_cross_entropy(model(one.to("cuda"), other.to("cuda")).squeeze(), target).backward()
            optimizer.step()


def contrastive_with_a_queue() -> None:
    """A slow encoder by momentum, whose outputs stand in a queue as negatives."""
    query, key = _small(32).cuda(), _small(32).cuda()
    key.load_state_dict(query.state_dict())
    queue = F.normalize(torch.randn(32, 256, device="cuda"), dim=0)
    optimizer = torch.optim.SGD(query.parameters(), 0.03, momentum=0.9)
    at = 0
    for _epoch in range(2):
        for one, other in torch.utils.data.DataLoader(Pairs(256), 32, shuffle=True):
            q = F.normalize(query(one.cuda()), dim=1)
            with torch.no_grad():
                for mean, value in zip(key.parameters(), query.parameters(), strict=True):
                    mean.data = mean.data * 0.99 + value.data * 0.01
                k = F.normalize(key(other.cuda()), dim=1)
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.clone().detach()], 1) / 0.07
            loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long).cuda())
            queue[:, at : at + len(k)] = k.T
            at = (at + len(k)) % queue.shape[1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def outputs_in_a_bounded_list() -> None:
    """A buffer of earlier outputs that is popped."""
    model = nn.Conv2d(3, 8, 3, padding=1).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    kept: list[torch.Tensor] = []
    for _epoch in range(2):
        for x, _ in images(1600, 8):
            output = model(x.cuda())
            optimizer.zero_grad()
            output.square().mean().backward()
            optimizer.step()
            kept.append(output.detach())
            if len(kept) > 50:
                kept.pop(0)


def losses_in_a_bounded_queue() -> None:
    """A running mean of the latest losses."""
    model = _small().cuda()
    optimizer = torch.optim.RMSprop(model.parameters())
    latest: deque[float] = deque(maxlen=20)
    for _epoch in range(2):
        for x, y in images(160, 16):
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            latest.append(loss.item())
            str(sum(latest) / len(latest))


def distillation() -> None:
    """A student that follows a teacher without gradients."""
    teacher, student = _small().cuda().eval(), nn.Sequential(nn.Flatten(), nn.Linear(768, 10)).cuda()
    optimizer = torch.optim.Adam(student.parameters())
    for _epoch in range(2):
        for x, y in images(160, 32):
            x, y = x.cuda(), y.cuda()
            with torch.no_grad():
                wanted = F.softmax(teacher(x) / 2, 1)
            logits = student(x)
            loss = F.kl_div(F.log_softmax(logits / 2, 1), wanted, reduction="batchmean") + F.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(768, 768), nn.GELU()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def gradient_checkpointing() -> None:
    """Blocks whose activations are computed again."""
    model = nn.Sequential(nn.Flatten(), _Checkpointed(), nn.Linear(768, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _epoch in range(2):
        for x, y in images(256, 32):
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(x.cuda()), y.cuda()).backward()
            optimizer.step()


def segmentation() -> None:
    """An encoder and a decoder with a skip, a class for each pixel, and a polynomial schedule by step."""
    down, middle = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 1, 1)
    up = nn.ConvTranspose2d(16, 5, 2, 2)
    model = nn.ModuleList([down, middle, up]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 - step / 16) ** 0.9)
    for _epoch in range(2):
        for x, _ in images(128, 16):
            target = torch.randint(0, 5, (len(x), 16, 16)).cuda()
            features = F.relu(down(x.cuda()))
            logits = up(features + F.relu(middle(features)))
            loss = F.cross_entropy(logits, target, ignore_index=255)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()


def cross_validation() -> None:
    """Three folds, each with a model and an optimizer of its own."""
    data = images(240, 32).dataset
    for fold in range(3):
        chosen = [index for index in range(240) if index % 3 != fold]
        model = _small().cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _epoch in range(2):
            for x, y in torch.utils.data.DataLoader(torch.utils.data.Subset(data, chosen), 32):
                optimizer.zero_grad()
                F.cross_entropy(model(x.cuda()), y.cuda()).backward()
                optimizer.step()


PROGRAMS: dict[Callable[[], object], int | None] = {
    mnist: 30,
    transfer_learning: 15,
    average_and_mixup: 32,
    stochastic_weight_averaging: 20,
    siamese: 20,
    contrastive_with_a_queue: 16,
    outputs_in_a_bounded_list: 400,
    losses_in_a_bounded_queue: 20,
    distillation: 10,
    gradient_checkpointing: 16,
    segmentation: 16,
    cross_validation: 30,
}
"""The programs, with the steps that each makes."""
