"""Programs whose habit is how weights are changed: precision, own optimizers and functions, penalties, averages, frozen parts."""
# ruff: noqa: PLW2901 - as users write it

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

from tests.corpus.data import images, rows, tokens


def _convolutional(classes: int = 10) -> nn.Sequential:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes))


def scaled_half_precision() -> None:
    """Autocast in float16 with a scaler, gradients unscaled before they are clipped, logits in float32."""
    model = _convolutional().cuda()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
    for _epoch in range(2):
        for x, y in images(160, 16):
            x, y = x.cuda(), y.cuda()
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                logits = model(x)
                loss = F.cross_entropy(logits.float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()


def brain_floats_accumulated() -> None:
    """Autocast in bfloat16 without a scaler, four micro-batches a step, an evaluation that is cast, too."""
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _epoch in range(2):
        for at, (x, y) in enumerate(rows(640, 16)):
            with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
                logits = model(x.cuda())
            loss = F.cross_entropy(logits.float(), y.cuda()) / 4
            loss.backward()
            if (at + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
            for x, _ in rows(64, 32):
                model(x.cuda()).argmax(1).tolist()


class _Rounded(torch.autograd.Function):
    """Rounds forward, and lets the gradient through where nothing was clipped."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, limit: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.limit = limit
        return (x.clamp(-limit, limit) * 127 / limit).round() * limit / 127

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= ctx.limit), None


class _FakeQuantized(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = _Rounded.apply(self.weight, 1.0)  # type: ignore[no-untyped-call]
        return F.linear(_Rounded.apply(x, 4.0), weight, self.bias)  # type: ignore[no-untyped-call]


def quantization_aware() -> None:
    """Weights and activations are rounded in the forward pass by a function with a backward pass of its own."""
    model = nn.Sequential(_FakeQuantized(32, 128), nn.ReLU(), _FakeQuantized(128, 4)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(3):
        if epoch == 2:
            for group in optimizer.param_groups:
                group["lr"] *= 0.1
        for x, y in rows(160, 16):
            optimizer.zero_grad()
            F.cross_entropy(model(x.cuda()), y.cuda()).backward()
            optimizer.step()


class _Swish(torch.autograd.Function):
    """Keeps its input alone, and computes the rest again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        share = torch.sigmoid(x)
        out: torch.Tensor = gradient * (share * (1 + x * (1 - share)))
        return out


class _Own(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Swish.apply(x)  # type: ignore[no-untyped-call]
        return out


def frugal_activation() -> None:
    """An activation as a function of the program's own, in a deep network."""
    layers = [part for _ in range(6) for part in (nn.Linear(64, 64), _Own())]
    model = nn.Sequential(nn.Linear(32, 64), _Own(), *layers, nn.Linear(64, 4)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _epoch in range(2):
        for x, y in rows(160, 16):
            optimizer.zero_grad()
            F.cross_entropy(model(x.cuda()), y.cuda()).backward()
            optimizer.step()


class _Lion(torch.optim.Optimizer):
    """An optimizer of the program's own: the sign of a momentum."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                if len(state) == 0:
                    state["momentum"] = torch.zeros_like(p)
                momentum, (first, second) = state["momentum"], group["betas"]
                update = (momentum * first + p.grad * (1 - first)).sign_()
                p.add_(update, alpha=-group["lr"])
                momentum.mul_(second).add_(p.grad, alpha=1 - second)


def own_optimizer() -> None:
    """An optimizer that the program defines, with decay for matrices alone."""
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 4)).cuda()
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1}]
    groups += [{"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = _Lion(groups, lr=3e-4)
    for _epoch in range(2):
        for x, y in rows(160, 16):
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def stepping_in_the_backward_pass() -> None:
    """Each parameter steps as soon as its gradient is there, so no two gradients are alive at once."""
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)).cuda()
    optimizers = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for _epoch in range(2):
        for x, y in rows(160, 16):
            F.cross_entropy(model(x.cuda()), y.cuda()).backward()


class _Average:
    """A slow copy of the weights, which takes their place in an evaluation."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.shadow = {name: p.data.clone() for name, p in model.named_parameters() if p.requires_grad}

    def update(self) -> None:
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                self.shadow[name] = self.decay * self.shadow[name] + (1 - self.decay) * p.data

    @contextmanager
    def applied(self) -> Iterator[None]:
        backup = {name: p.data for name, p in self.model.named_parameters() if p.requires_grad}
        for name, p in self.model.named_parameters():
            p.data = self.shadow[name]
        yield
        for name, p in self.model.named_parameters():
            p.data = backup[name]


def average_in_evaluation() -> None:
    """An average of the weights in a class of the program's own, which is evaluated and given back after each epoch."""
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 4)).cuda()
    average = _Average(model, 0.99)
    optimizer = torch.optim.AdamW(model.parameters())
    for _epoch in range(2):
        for x, y in rows(160, 16):
            loss = F.cross_entropy(model(x.cuda()), y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update()
        with torch.no_grad(), average.applied():
            for x, _ in rows(32, 16):
                model(x.cuda()).argmax(1).cpu()


def penalties() -> None:
    """L1 on the first layer, weights that are kept orthogonal, and noise on the inputs."""
    model = nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 4)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _epoch in range(2):
        for x, y in rows(160, 16):
            x, y = x.cuda(), y.cuda()
            loss = F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y)
            loss = loss + 1e-4 * model[0].weight.abs().sum()  # type: ignore[operator]
            weight: Any = model[2].weight
            loss = loss + 1e-3 * (weight @ weight.T - torch.eye(96, device="cuda")).pow(2).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def resumed() -> None:
    """Two epochs, a checkpoint of everything, and two more epochs with new objects that load it."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 4)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        for first in (0, 2):
            model, optimizer, scheduler = made()
            start = 0
            if path.exists():
                states = torch.load(path, map_location="cuda")
                model.load_state_dict(states["model"])
                optimizer.load_state_dict(states["optimizer"])
                scheduler.load_state_dict(states["scheduler"])
                start = states["epoch"] + 1
                del states
            for epoch in range(start, first + 2):
                for x, y in rows(160, 16):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x.cuda()), y.cuda()).backward()
                    optimizer.step()
                scheduler.step()
                parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
                torch.save({name: part.state_dict() for name, part in parts.items()} | {"epoch": epoch}, path)


class _Tasks(nn.Module):
    def __init__(self, tasks: dict[str, int]) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(32, 128), nn.ReLU())
        self.heads = nn.ModuleDict({name: nn.Linear(128, classes) for name, classes in tasks.items()})

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        out: torch.Tensor = self.heads[task](self.trunk(x))
        return out


def tasks_in_turn() -> None:
    """Three tasks with data of their own, one batch of each in turn, until the shortest ends."""
    tasks = {"colour": 4, "shape": 7, "size": 3}
    model = _Tasks(tasks).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    loaders = {name: rows(160 + 32 * at, 16, classes=tasks[name]) for at, name in enumerate(tasks)}
    for _epoch in range(2):
        for batches in zip(*loaders.values(), strict=False):
            for name, (x, y) in zip(loaders, batches, strict=True):
                optimizer.zero_grad()
                F.cross_entropy(model(x.cuda(), name), y.cuda()).backward()
                optimizer.step()


def partly_frozen() -> None:
    """The first layers are frozen, the others learn at rates that fall towards the input, and a dropped head is made anew."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(5)), nn.Linear(32, 10))
    model[-1] = nn.Linear(32, 4)
    for layer in list(model)[:2]:
        layer.requires_grad_(False).eval()
    model.cuda()
    groups = [{"params": layer.parameters(), "lr": 1e-3 * 0.7 ** (len(model) - at)} for at, layer in enumerate(model) if at >= 2]
    optimizer = torch.optim.AdamW(groups)
    for _epoch in range(2):
        for x, y in rows(160, 16):
            optimizer.zero_grad()
            F.cross_entropy(model(x.cuda()), y.cuda()).backward()
            optimizer.step()


class _Hooked:
    """Outputs of layers by hooks."""

    def __init__(self, model: nn.Sequential, layers: tuple[int, ...]) -> None:
        self.outputs: dict[int, torch.Tensor] = {}
        for at in layers:
            model[at].register_forward_hook(lambda _, __, output, at=at: self.outputs.__setitem__(at, output))


def taught_by_features() -> None:
    """A student follows the answers of two teachers and the features of one, which hooks give."""
    teachers = [_convolutional().cuda().eval().requires_grad_(False) for _ in range(2)]
    student = _convolutional().cuda()
    of_teacher, of_student = _Hooked(teachers[0], (1, 4)), _Hooked(student, (1, 4))
    optimizer = torch.optim.SGD(student.parameters(), 0.05, momentum=0.9)
    for _epoch in range(2):
        for x, y in images(160, 16):
            x, y = x.cuda(), y.cuda()
            with torch.no_grad():
                wanted = torch.stack([teacher(x) for teacher in teachers]).mean(0)
            logits = student(x)
            loss = F.cross_entropy(logits, y)
            loss = loss + 16 * F.kl_div(F.log_softmax(logits / 4, 1), F.softmax(wanted / 4, 1), reduction="batchmean")
            for at, features in of_student.outputs.items():
                loss = loss + F.mse_loss(features, of_teacher.outputs[at])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def ensemble_by_vmap() -> None:
    """Five networks as one, by stacked parameters and a map over them."""
    models = [nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).cuda() for _ in range(5)]
    parameters, buffers = stack_module_state(models)
    skeleton = copy.deepcopy(models[0]).to("meta")
    del models
    optimizer = torch.optim.Adam(parameters.values())

    def one(params: Any, state: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = functional_call(skeleton, (params, state), (x,))
        return out

    for _epoch in range(2):
        for x, y in rows(160, 16):
            logits = vmap(one, in_dims=(0, 0, None))(parameters, buffers, x.cuda())
            loss = F.cross_entropy(logits.flatten(0, 1), y.cuda().repeat(5))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def private_gradients() -> None:
    """The gradient of each sample by a map, clipped by its norm, with noise on their sum."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_of(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, params, (x[None],)), y[None])

    each = vmap(grad(loss_of), in_dims=(None, 0, 0))
    for _epoch in range(2):
        for x, y in rows(160, 16):
            params = {name: p.detach() for name, p in model.named_parameters()}
            gradients = each(params, x.cuda(), y.cuda())
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
            factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
            for name, p in model.named_parameters():
                clipped = torch.einsum("n,n...->...", factor, gradients[name])
                p.grad = (clipped + torch.randn_like(clipped)) / len(x)
            optimizer.step()
            optimizer.zero_grad()


def compiled_in_modes() -> None:
    """A network that is compiled for each of two modes, one after the other; the first only if a flag asks for it."""
    for options in ({"mode": "reduce-overhead"}, {"dynamic": True}):
        model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 4)).cuda()
        compiled = torch.compile(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        for _epoch in range(2):
            for x, y in rows(160, 16):
                optimizer.zero_grad()
                F.cross_entropy(compiled(x.cuda()), y.cuda()).backward()
                optimizer.step()


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(100, 48), nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 48))
        self.out = nn.Linear(48, 100, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.out(self.body(self.embedding(x) * math.sqrt(48)))
        return hidden


def tied_weights() -> None:
    """The matrix of words is that of the outputs, too; losses weigh later words less."""
    model = _Tied().to(torch.device("cuda", 0))
    optimizer = torch.optim.Adamax(model.parameters())
    for _epoch in range(2):
        for x, y in tokens(160, 16):
            loss = F.cross_entropy(model(x.cuda()).transpose(1, 2), y.cuda(), reduction="none")
            loss = (loss * torch.linspace(1, 0.5, loss.shape[1], device="cuda")).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


PROGRAMS: dict[Callable[[], object], int | None] = {
    scaled_half_precision: 20,
    brain_floats_accumulated: 20,
    quantization_aware: 30,
    frugal_activation: 20,
    own_optimizer: 20,
    stepping_in_the_backward_pass: 20,
    average_in_evaluation: 20,
    penalties: 20,
    resumed: 40,
    tasks_in_turn: 60,
    partly_frozen: 20,
    taught_by_features: 20,
    ensemble_by_vmap: 20,
    private_gradients: 20,
    compiled_in_modes: 40,
    tied_weights: 20,
}
"""The programs, with the steps that each makes."""
