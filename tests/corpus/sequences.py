"""Programs that train on texts, series, tables and graphs, as public code does."""
# ruff: noqa: PLW2901 - as users write it

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from tests.corpus.data import rows, tokens


class _Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attention(self.first(x)).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        x = x + self.out(scores.softmax(-1) @ v)
        out: torch.Tensor = x + self.mlp(self.second(x))
        return out


def _language_model() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(100, 32), _Block(), _Block(), nn.LayerNorm(32), nn.Linear(32, 100))


def character_model() -> None:
    """Random parts of a long text, several micro-batches a step, a warm-up, and an evaluation every 20 steps."""
    text = torch.randint(0, 100, (5000,))
    model = _language_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95))

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(text) - 24, (8,))
        x, y = (torch.stack([text[i + ahead : i + ahead + 24] for i in starts]) for ahead in (0, 1))
        return x.to("cuda"), y.to("cuda")

    for step in range(60):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1, (step + 1) / 10)
        if step % 20 == 0:
            model.eval()
            with torch.no_grad():
                for _ in range(4):
                    x, y = batch()
                    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
            model.train()
        for _micro in range(3):
            x, y = batch()
            (F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def translation() -> None:
    """Texts from a loader, labels smoothed, a schedule by step."""
    model = _language_model().cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)
    for _epoch in range(2):
        for x, y in tokens(160, 16):
            logits = model(x.cuda())
            loss = F.cross_entropy(logits.reshape(-1, 100), y.cuda().reshape(-1), label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()


class _Adapted(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.01)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(x) + x @ self.a.T @ self.b.T
        return found


def low_rank_adapters() -> None:
    """A frozen model with low-rank adapters in its linear layers."""
    model = _language_model().requires_grad_(False)
    for name, part in [*model.named_modules()]:
        if name.endswith(("attention", "out")) and isinstance(part, nn.Linear):
            model.set_submodule(name, _Adapted(part))
    model.cuda()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    for _epoch in range(2):
        for x, y in tokens(160, 16):
            loss = F.cross_entropy(model(x.cuda()).flatten(0, 1), y.cuda().flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


class _Forecast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 32), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.new_zeros(len(x), 32)
        for time in range(x.shape[1]):
            hidden = torch.tanh(self.cell.weight_hh[:32] @ hidden.T).T + F.linear(x[:, time], self.cell.weight_ih[:32])
        out: torch.Tensor = self.head(hidden)
        return out


def time_series() -> None:
    """Windows of a series, and early stopping by a validation."""
    model = _Forecast().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    best, waited = float("inf"), 0
    for _epoch in range(20):
        for x, y in rows(320, 32, width=40):
            loss = F.mse_loss(model(x.view(-1, 10, 4).cuda()), y.float()[:, None].cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            value = sum(model(x.view(-1, 10, 4).cuda()).square().mean().item() for x, _ in rows(64, 32, width=40))
        if value < best:
            best, waited = value, 0
        else:
            waited += 1
        if waited == 3:
            break


def tabular() -> None:
    """Embeddings of categories beside numbers, weights of classes, and outputs that are gathered on the host."""
    embedding, net = (
        nn.Embedding(4, 8).cuda(),
        nn.Sequential(nn.Linear(40, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)).cuda(),
    )
    optimizer = torch.optim.Adam([*embedding.parameters(), *net.parameters()])
    weights = torch.tensor([1.0, 2.0, 1.0, 1.0]).cuda()
    for _epoch in range(3):
        outputs = []
        for x, y in rows(320, 32):
            kind = y.cuda()
            logits = net(torch.cat([x.cuda(), embedding(kind)], 1))
            loss = F.cross_entropy(logits, kind, weight=weights)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            outputs.append(logits.detach().cpu())
        torch.cat(outputs).argmax(1).numpy()


def graph_network() -> None:
    """The whole graph in each step, two layers of sums over neighbours, masks for training."""
    nodes, edges = torch.randn(200, 16).cuda(), torch.randint(0, 200, (2, 800)).cuda()
    labels, mask = torch.randint(0, 4, (200,)).cuda(), (torch.arange(200) < 120).cuda()
    first, second = nn.Linear(16, 32).cuda(), nn.Linear(32, 4).cuda()
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], 0.01, weight_decay=5e-4)
    for _epoch in range(60):
        hidden = F.relu(first(nodes))
        hidden = torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]])
        out = second(hidden)
        out = torch.zeros_like(out).index_add(0, edges[1], out[edges[0]])
        loss = F.cross_entropy(out[mask], labels[mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def clipped_by_hand() -> None:
    """A linear model that the program updates itself."""
    weight = torch.randn(32, 4, device="cuda", requires_grad=True)
    bias = torch.zeros(4, device="cuda", requires_grad=True)
    for _epoch in range(3):
        for x, y in rows(320, 32):
            loss = F.cross_entropy(x.cuda() @ weight + bias, y.cuda())
            loss.backward()
            with torch.no_grad():
                for parameter in (weight, bias):
                    assert parameter.grad is not None
                    parameter -= 0.1 * parameter.grad
                    parameter.grad.zero_()


def half_precision() -> None:
    """A model in bfloat16, with accumulation over four batches."""
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 4)).to("cuda", torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _epoch in range(2):
        for at, (x, y) in enumerate(rows(1280, 32), 1):
            loss = F.cross_entropy(model(x.to("cuda", torch.bfloat16)), y.to("cuda")) / 4
            loss.backward()
            if at % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()


PROGRAMS: dict[Callable[[], object], int | None] = {
    character_model: 60,
    translation: 20,
    low_rank_adapters: 20,
    time_series: None,
    tabular: 30,
    graph_network: 60,
    clipped_by_hand: 30,
    half_precision: 20,
}
"""The programs, with the steps that each makes. None: a value decides, so nobody knows them before."""
