"""Programs that generate, play, and solve equations, as public code does."""
# ruff: noqa: PLW2901 - as users write it

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from tests.corpus.data import images, rows


def dcgan() -> None:
    """A discriminator and a generator that step in turn."""
    make = nn.Sequential(
        nn.ConvTranspose2d(16, 32, 4), nn.BatchNorm2d(32), nn.ReLU(), nn.ConvTranspose2d(32, 3, 4, 4), nn.Tanh()
    ).cuda()
    judge = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.LeakyReLU(0.2), nn.Conv2d(16, 1, 4), nn.Flatten(), nn.Sigmoid()).cuda()
    of_make, of_judge = (torch.optim.Adam(net.parameters(), 2e-4, betas=(0.5, 0.999)) for net in (make, judge))
    for _epoch in range(2):
        for real, _ in images(160, 16):
            real = real.cuda()
            judge.zero_grad()
            label = torch.full((len(real), 1), 1.0, device="cuda")
            F.binary_cross_entropy(judge(real), label).backward()
            fake = make(torch.randn(len(real), 16, 1, 1, device="cuda"))
            label.fill_(0.0)
            F.binary_cross_entropy(judge(fake.detach()), label).backward()
            of_judge.step()
            make.zero_grad()
            label.fill_(1.0)
            F.binary_cross_entropy(judge(fake), label).backward()
            of_make.step()


def gradient_penalty() -> None:
    """A critic whose gradient at points between is kept near one."""
    critic = nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.Adam(critic.parameters())
    for _epoch in range(2):
        for real, _ in rows(320, 32):
            real = real.cuda()
            fake = torch.randn_like(real)
            share = torch.rand(len(real), 1, device="cuda")
            between = (share * real + (1 - share) * fake).requires_grad_(True)
            output = critic(between)
            gradient = torch.autograd.grad(output, between, torch.ones_like(output), create_graph=True)[0]
            loss = critic(fake).mean() - critic(real).mean() + 10 * (gradient.norm(2, dim=1) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class _Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(256, 64)
        self.mean, self.log_variance = nn.Linear(64, 8), nn.Linear(64, 8)
        self.decode = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 256), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = F.relu(self.encode(x.view(-1, 256)))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        std = torch.exp(0.5 * log_variance)
        return self.decode(mean + torch.randn_like(std) * std), mean, log_variance


def variational_autoencoder() -> None:
    """A loss of two terms, a test, and a sample after each epoch."""
    model = _Vae().to("cuda")
    optimizer = torch.optim.Adam(model.parameters())
    for _epoch in range(3):
        total = 0.0
        for x, _ in images(256, 32, channels=1):
            x = x.sigmoid().to("cuda")
            optimizer.zero_grad()
            made, mean, log_variance = model(x)
            loss = F.binary_cross_entropy(made, x.view(-1, 256), reduction="sum")
            loss = loss - 0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
            loss.backward()
            total += loss.item()
            optimizer.step()
        with torch.no_grad():
            model.decode(torch.randn(64, 8).to("cuda")).cpu()


def diffusion() -> None:
    """Noise of a random time is predicted; samples are drawn step by step at the end."""
    model = nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 20), 0).cuda()

    def predict(x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        channel = (time.float() / 20)[:, None, None, None].expand(-1, 1, *x.shape[2:])
        out: torch.Tensor = model(torch.cat([x, channel], 1))
        return out

    for _epoch in range(2):
        for x, _ in images(160, 16):
            x = x.cuda()
            noise = torch.randn_like(x)
            time = torch.randint(0, 20, (len(x),), device="cuda")
            share = kept[time][:, None, None, None]
            loss = F.mse_loss(predict(share.sqrt() * x + (1 - share).sqrt() * noise, time), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        x = torch.randn(4, 3, 16, 16, device="cuda")
        for at in reversed(range(20)):
            x = x - 0.1 * predict(x, torch.full((4,), at, device="cuda"))


def policy_gradient() -> None:
    """Episodes of fixed length, whose log-probabilities are kept until their end."""
    policy = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 2)).cuda()
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    for _episode in range(40):
        state, kept, rewards = torch.randn(4), [], []
        for _time in range(10):
            distribution = torch.distributions.Categorical(logits=policy(state.cuda()))
            action = distribution.sample()
            kept.append(distribution.log_prob(action))
            state = torch.randn(4)
            rewards.append(1.0)
        returns = torch.tensor(rewards).cumsum(0).flip(0).cuda()
        loss = -(torch.stack(kept) * (returns - returns.mean())).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def q_learning() -> None:
    """A memory of transitions on the host, and a target network that is copied every 20 steps."""
    policy = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)).cuda()
    target = copy.deepcopy(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), amsgrad=True)
    memory = torch.randn(1000, 18)
    for step in range(100):
        batch = memory[torch.randint(0, 1000, (64,))].cuda()
        state, following, reward = batch[:, :8], batch[:, 8:16], batch[:, 16]
        action = torch.randint(0, 4, (64, 1)).cuda()
        values = policy(state).gather(1, action).squeeze(1)
        with torch.no_grad():
            wanted = reward + 0.99 * target(following).max(1).values
        loss = F.smooth_l1_loss(values, wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(policy.parameters(), 100)
        optimizer.step()
        if step % 20 == 0:
            target.load_state_dict(policy.state_dict())


def physics_informed() -> None:
    """A differential equation: two derivatives of the network at random points."""
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).cuda()
    optimizer = torch.optim.Adam(net.parameters())
    for _step in range(60):
        x = torch.rand(128, 1, device="cuda", requires_grad=True)
        t = torch.rand(128, 1, device="cuda", requires_grad=True)
        u = net(torch.cat([x, t], 1))
        of_x, of_t = torch.autograd.grad(u, (x, t), torch.ones_like(u), create_graph=True)
        of_xx = torch.autograd.grad(of_x, x, torch.ones_like(of_x), create_graph=True)[0]
        loss = (of_t + u * of_x - 0.01 * of_xx).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def meta_learning() -> None:
    """Model-agnostic: three inner steps of each task, and one through them."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _step in range(30):
        total = torch.zeros((), device="cuda")
        for _task in range(3):
            x, y = torch.randn(25, 16).cuda(), torch.randint(0, 5, (25,)).cuda()
            params: dict[str, torch.Tensor] = dict(model.named_parameters())
            for _inner in range(2):
                loss = F.cross_entropy(functional_call(model, params, (x,)), y)
                gradients = torch.autograd.grad(loss, tuple(params.values()), create_graph=True)
                params = {name: p - 0.1 * g for (name, p), g in zip(params.items(), gradients, strict=True)}
            total = total + F.cross_entropy(functional_call(model, params, (x,)), y)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()


PROGRAMS: dict[Callable[[], object], int | None] = {
    dcgan: 20,
    gradient_penalty: 20,
    variational_autoencoder: 24,
    diffusion: 20,
    policy_gradient: 40,
    q_learning: 100,
    physics_informed: 60,
    meta_learning: 30,
}
"""The programs, with the steps that each makes."""
