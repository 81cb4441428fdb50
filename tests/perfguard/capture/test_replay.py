"""A loop that goes on without its model is counted to its end, and shows nothing else than one that goes on with it."""
# ruff: noqa: PLW2901 - as users write `x = x.cuda()`

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from perfguard.capture import Answer, DryRuns
from perfguard.capture.replay import Replay, has_backward_hooks, key_of
from perfguard.capture.trial import Watch, capture
from perfguard.devices import resolve_device
from perfguard.workload import CapturedTrial

A100, CPU = resolve_device("a100"), resolve_device("cpu")


@pytest.fixture(autouse=True)
def _few_objects_to_collect() -> Iterator[None]:
    gc.freeze()
    yield
    gc.unfreeze()


class Model(nn.Module):
    """Counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.head = nn.Linear(128, 10)
        self.num_forwards = 0
        self.size = 0
        self.returns_features = False

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> Any:
        self.num_forwards += 1
        x = F.interpolate(x, size=self.size) if self.size else x
        features = self.layers(x)
        output: torch.Tensor = self.head(features)
        return (output * scale, features) if self.returns_features else output * scale


def images(number: int = 160, batch: int = 16, size: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(number, 3, size, size), torch.randint(0, 10, (number,))), batch)


def evaluated(model: nn.Module, loader: Iterable[Any], kept: list[Any] | None = None) -> int:
    model.eval()
    right = 0
    with torch.no_grad():
        for x, y in loader:
            output = model(x.cuda())
            right += (output.argmax(1) == y.cuda()).sum().item()
            if kept is not None:
                kept.append(output)
    model.train()
    return right


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x.cuda()), y.cuda())


def plain(model: nn.Module, epochs: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for x, y in images():
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
        scheduler.step()
        evaluated(model, images(64))


def zeroed_after_the_step(model: nn.Module, epochs: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for _ in range(epochs):
        for number, (x, y) in enumerate(images()):
            (loss_of(model, x, y) / 2).backward()
            if number % 2:
                norms = [parameter.grad.norm() for parameter in model.parameters()]  # type: ignore[union-attr]
                nn.utils.clip_grad_norm_(model.parameters(), max(1.0, float(norms[0])))
                optimizer.step()
                for parameter in model.parameters():
                    parameter.grad = None


def scaled(model: nn.Module, epochs: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(epochs):
        for x, y in images():
            with torch.autocast("cuda", torch.float16):
                loss = loss_of(model, x, y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()


def with_a_closure(model: nn.Module, epochs: int) -> None:
    optimizer = torch.optim.SGD(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    for _ in range(epochs):
        for x, y in images():  # noqa: B007 - the closure reads them
            assert optimizer.step(closure).detach().item() == 0.0


def in_turns(model: nn.Module, epochs: int) -> None:
    """Two optimizers, whose gradients are gone after each step, and read before it."""
    optimizers = [torch.optim.SGD(part.parameters()) for part in (model.layers, model.head)]  # type: ignore[union-attr]
    for _ in range(epochs):
        for x, y in images():
            loss_of(model, x, y).backward()
            assert all(parameter.grad is not None for parameter in model.parameters())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def adversarial(model: nn.Module, epochs: int) -> None:
    """Two optimizers, a gradient penalty, and changes in place of what a model returns."""
    generator = nn.Sequential(nn.Linear(5, 3 * 64), nn.Unflatten(1, (3, 8, 8))).cuda()
    of_model, of_generator = torch.optim.Adam(model.parameters()), torch.optim.Adam(generator.parameters())
    for _ in range(epochs):
        for x, _y in images():
            x = x.cuda()
            fake = generator(torch.randn(len(x), 5, device="cuda"))
            of_model.zero_grad()
            mixed = (x + fake.detach()).requires_grad_()
            (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
            (model(x).mul_(2).mean() - model(fake.detach()).mean() + slope.square().mean()).backward()
            of_model.step()
            of_generator.zero_grad()
            (-model(fake)).mean().backward()
            of_generator.step()


def with_a_test_at_the_end(model: nn.Module, epochs: int) -> None:
    """What the test set leaves on the device is most of all."""
    plain(model, epochs)
    kept: list[torch.Tensor] = []
    evaluated(model, images(16_000, batch=16), kept)
    torch.cat(kept)


def with_larger_images_later(model: nn.Module, epochs: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for epoch in range(epochs):
        for x, y in images(size=32 if epoch == epochs - 2 else 8):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()


def with_an_average(model: nn.Module, epochs: int) -> None:
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(epochs):
        for x, y in images():
            optimizer.zero_grad(set_to_none=False)
            loss_of(model, x, y).backward()
            optimizer.step()
            average.update_parameters(model)
        evaluated(average, images(64))


def with_batches_that_it_changes(model: nn.Module, epochs: int) -> None:
    """The user takes parts out of a batch, and changes shapes in place."""
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(epochs):
        for batch in DataLoader(Named(), 16):
            y = batch.pop("labels")
            x = batch["images"].unsqueeze_(0)
            optimizer.zero_grad()
            loss_of(model, x[0], y).backward()
            optimizer.step()


class Named(Dataset[Any]):
    """Images with labels, by name."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"images": torch.randn(3, 8, 8), "labels": index % 10}


def with_a_scheduler_for_each_epoch(model: nn.Module, epochs: int) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(epochs):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        for x, y in images():
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            scheduler.step()


def with_a_model_that_changes(
    change: Callable[[nn.Module, torch.optim.Optimizer], object],
) -> Callable[[nn.Module, int], None]:
    """Train a part of a model, and ``change`` it in the last epochs but three, when the loop goes on without it."""

    def run(model: nn.Module, epochs: int) -> None:
        model.layers.requires_grad_(False)
        optimizer = torch.optim.Adam(model.parameters())
        for epoch in range(epochs):
            if epoch == epochs - 3:
                change(model, optimizer)
            for x, y in images():
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
            evaluated(model, images(64))

    return run


def unfreeze(model: nn.Module, _: object) -> None:
    model.requires_grad_()


def add_a_layer(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.head = nn.Sequential(nn.Linear(128, 4000).cuda(), nn.Linear(4000, 10).cuda())
    optimizer.add_param_group({"params": model.head.parameters()})


def enlarge(model: Any, _: object) -> None:
    model.size = 64


class Loop(NamedTuple):
    """A loop of a user, with its steps in an epoch."""

    run: Callable[[nn.Module, int], None]
    per_epoch: int = 10


LOOPS = {
    "plain": Loop(plain),
    "zeroed_after_the_step": Loop(zeroed_after_the_step, 5),
    "scaled": Loop(scaled),
    "with_a_closure": Loop(with_a_closure),
    "in_turns": Loop(in_turns),
    "adversarial": Loop(adversarial),
    "with_a_test_at_the_end": Loop(with_a_test_at_the_end),
    "with_larger_images_later": Loop(with_larger_images_later),
    "with_an_average": Loop(with_an_average),
    "with_batches_that_it_changes": Loop(with_batches_that_it_changes),
    "with_a_scheduler_for_each_epoch": Loop(with_a_scheduler_for_each_epoch),
}


def seen(run: Callable[[nn.Module, int], None], epochs: int, *, spares: bool = False) -> tuple[CapturedTrial, int]:
    """What a dry run shows, and how many forward passes it has run."""
    counts: list[int] = []

    def objective() -> None:
        model = Model().cuda()
        try:
            run(model, epochs)
        finally:
            counts.append(model.num_forwards)

    torch.manual_seed(0)
    return capture(objective, A100, spares=spares, most_seconds=60.0), counts[0]


@pytest.mark.parametrize("name", LOOPS)
def test_a_replayed_loop_shows_what_one_with_its_model_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, per_epoch = LOOPS[name]
    replayed, num_replayed = seen(run, 30)
    monkeypatch.setattr(Watch, "_can_replay", lambda _: False)
    whole, num_whole = seen(run, 30)
    assert (replayed.steps, replayed.steps_per_epoch, replayed.unseen) == (30 * per_epoch, per_epoch, "")
    assert num_replayed < 0.7 * num_whole
    assert replayed.graph.content_hash == whole.graph.content_hash
    peaks, expected = ({name: graph.peak_live_bytes for name, graph in each.phases.items()} for each in (replayed, whole))
    assert peaks == expected


def test_the_number_of_forward_passes_does_not_grow_with_the_epochs() -> None:
    (few, num_few), (many, num_many) = seen(plain, 20), seen(plain, 400)
    assert (few.steps, many.steps) == (200, 4000)
    assert num_few == num_many


@pytest.mark.parametrize("change", [unfreeze, add_a_layer, enlarge])
def test_a_model_that_changes_in_a_replayed_loop_is_seen(
    change: Callable[[nn.Module, torch.optim.Optimizer], object],
) -> None:
    """Its largest step is that of a trial in which the model changes early, before the loop is replayed."""
    run = with_a_model_that_changes(change)
    (late, num_late), (early, _) = seen(run, 30), seen(run, 5)
    assert (late.steps, late.unseen) == (300, "")
    assert num_late < 60
    assert {name: graph.peak_live_bytes for name, graph in late.phases.items()} == {
        name: graph.peak_live_bytes for name, graph in early.phases.items()
    }
    assert len(late.phases) == 2


def test_a_model_that_returns_something_else_in_a_later_epoch_is_replayed_so() -> None:
    def run(model: Any, epochs: int) -> None:
        optimizer = torch.optim.Adam(model.parameters())
        for epoch in range(epochs):
            model.returns_features = epoch > epochs - 3
            for x, y in images():
                optimizer.zero_grad()
                output = model(x.cuda())
                loss = F.cross_entropy(output[0], y.cuda()) + output[1].mean() if epoch > epochs - 3 else output.mean()
                loss.backward()
                optimizer.step()

    found, _ = seen(run, 30)
    assert (found.steps, found.unseen) == (300, "")


def test_parameters_that_an_optimizer_gets_in_a_replayed_loop_have_states() -> None:
    """A second step after they were added holds their states, in the place of the gradients of a first one."""

    def run(model: nn.Module, epochs: int) -> None:
        wide = nn.Linear(10, 100_000).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        whole = nn.Sequential(model, wide)
        for epoch in range(epochs):
            if epoch == epochs - 3:
                optimizer.add_param_group({"params": wide.parameters()})
            for x, _ in images():
                whole.zero_grad()
                whole(x.cuda()).mean().backward()
                optimizer.step()

    (late, _), (early, _) = seen(run, 30), seen(run, 5)
    peaks = [max(graph.peak_live_bytes for graph in (found.graph, *found.phases.values())) for found in (late, early)]
    assert peaks[0] == peaks[1]
    assert peaks[0] > 1.2 * late.graph.peak_live_bytes


def test_steps_that_no_loader_feeds_are_counted_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: nn.Module, epochs: int) -> None:
        x, y = torch.randn(64, 3, 8, 8).cuda(), torch.randint(0, 10, (64,)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(epochs):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            monkeypatch.setattr("perfguard.capture.loaders.Loaders.may_spare", False)

    found, num_forwards = seen(run, 300, spares=True)
    assert (found.steps, found.unseen, num_forwards) == (300, "", 3)
    found, _ = seen(run, 300)  # a second dry run, which shows whether a value changes the step, ends at once
    assert found.steps == 300  # as the head of its loop says
    assert "do not come from a DataLoader" in found.unseen


def test_a_loop_that_no_loader_feeds_ends_if_its_inputs_are_new_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: nn.Module, epochs: int) -> None:
        optimizer = torch.optim.SGD(model.parameters())
        for epoch in range(epochs):
            optimizer.zero_grad()
            loss_of(model, torch.randn(4 + epoch, 3, 8, 8), torch.zeros(4 + epoch, dtype=torch.long)).backward()
            optimizer.step()
            monkeypatch.setattr("perfguard.capture.loaders.Loaders.may_spare", False)

    found, num_forwards = seen(run, 300, spares=True)
    assert (found.steps, num_forwards) == (300, 9)


def test_an_optimizer_that_steps_within_the_backward_pass_is_not_replayed() -> None:
    def run(model: nn.Module, epochs: int) -> None:
        optimizer = torch.optim.SGD(model.parameters())
        last = next(model.parameters())
        last.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        for _ in range(epochs):
            for x, y in images():
                loss_of(model, x, y).backward()

    found, num_forwards = seen(run, 12)
    assert found.steps == 120
    assert num_forwards > 12


def attacked(ask: Callable[..., Any]) -> None:
    """Training on images that are changed along their gradients, which no replay has."""
    model = Model().cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(ask("epochs")):
        for x, y in images():
            x = x.cuda().requires_grad_()
            loss_of(model, x, y).backward()
            assert x.grad is not None, "no gradient"
            optimizer.zero_grad()
            loss_of(model, (x + x.grad.sign()).detach(), y).backward()
            optimizer.step()


def test_a_loop_that_raises_an_error_in_a_replay_is_dry_run_with_its_model() -> None:
    runs = DryRuns(attacked, A100, spares=False)

    def shown(epochs: int) -> tuple[int | None, str, int]:
        before = runs._num_runs
        found = runs.capture(lambda name: Answer(name, epochs))
        return found.steps, found.unseen, runs._num_runs - before

    try:
        assert shown(30) == (300, "", 2)
        assert shown(40) == (400, "", 1), "it is known now"
    finally:
        runs.close()


def test_an_error_that_is_none_of_the_replay_is_looked_into_once() -> None:
    def failing(ask: Callable[..., Any]) -> None:
        plain(Model().cuda(), ask("epochs"))
        raise ValueError("of the user")

    runs = DryRuns(failing, A100, spares=False)
    try:
        found = [runs.capture(lambda name, epochs=epochs: Answer(name, epochs)) for epochs in (30, 40)]
        assert [(each.steps, each.unseen) for each in found] == [(None, "ValueError: of the user")] * 2
        assert runs._num_runs == 3
    finally:
        runs.close()


def test_a_second_optimizer_ends_the_replay() -> None:
    def run(model: nn.Module, epochs: int) -> None:
        plain(model, epochs)
        head = nn.Linear(10, 4000).cuda()
        optimizer = torch.optim.AdamW(head.parameters())
        for x, _ in images():
            optimizer.zero_grad()
            head(model(x.cuda()).detach()).mean().backward()
            optimizer.step()

    found, _ = seen(run, 20)
    assert found.num_optimizers == 2
    assert {op.shape for op in found.graph.ops if op.name == "addmm"} == {(16, 10), (16, 4000)}


def test_what_was_replayed_is_as_it_was() -> None:
    left: list[Any] = []

    def objective() -> None:
        model = Model().cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(20):
            for x, y in images():
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
        left.append(optimizer)

    capture(objective, A100)
    assert "step" not in vars(left[0])
    assert not hasattr(nn.Module.__call__, "__wrapped__")


# --- The parts ------------------------------------------------------------------------------------------------------------------


def test_a_forward_pass_is_known_by_the_shapes_of_its_inputs_its_mode_and_its_place() -> None:
    model, x = nn.Linear(3, 3), torch.zeros(2, 3)
    key = key_of(model, (x,), {}, None)
    assert key == key_of(model, (torch.ones(2, 3),), {}, None)
    assert key_of(model, (), {"x": [x], "scale": 0.1}, None) == key_of(model, (), {"x": [x], "scale": 0.2}, None)
    assert key_of(model, (x,), {"length": 3}, None) != key_of(model, (x,), {"length": 4}, None)
    others = [key_of(nn.Linear(3, 3), (x,), {}, None), key_of(model, (x[:1],), {}, None), key_of(model, (x,), {}, "test")]
    with torch.no_grad():
        others.append(key_of(model, (x,), {}, None))
    others.append(key_of(model.eval(), (x,), {}, None))
    assert key not in others
    assert key_of(model, (iter(()),), {}, None) is None


def test_a_forward_pass_is_known_by_the_state_of_its_model_but_not_by_what_it_counts() -> None:
    model, x = Model(), torch.zeros(2, 3, 8, 8)
    replay = Replay()

    def key() -> Any:
        return replay.key_of(model, (x,), {}, None)

    keys = [key()]
    replay.run(key(), model, lambda: model(x))
    model.size = 16
    keys.append(key())
    model.head.requires_grad_(False)
    keys.append(key())
    model.layers.append(nn.Linear(128, 128))
    keys.append(key())
    model.layers[1].eval()
    keys.append(key())
    model.num_forwards += 1
    assert len(set(keys)) == 5
    assert key() == keys[-1]
    lazy = nn.LazyLinear(3)
    assert key_of(lazy, (x,), {}, None) == key_of(lazy, (x,), {}, None)


def test_a_model_that_has_changed_runs_twice() -> None:
    model, replay = Model(), Replay()
    x = torch.zeros(2, 3, 8, 8, device="meta")
    model.to("meta")
    outputs: list[Any] = []
    replay.begin([])
    for _ in range(4):
        key = replay.key_of(model, (x,), {}, None)
        outputs.append(replay.output_of(key, model))
        if outputs[-1] is None:
            replay.run(key, model, lambda: model(x))
            replay.end_step()
    assert [output is None for output in outputs] == [True, True, False, False]
    replay.forget()
    assert replay.is_new(replay.key_of(model, (x,), {}, None), model)


def test_what_a_forward_pass_returns_is_new_each_time() -> None:
    model, replay = nn.Linear(3, 3), Replay()
    output = {"loss": torch.zeros(2, device="meta", requires_grad=True), "all": [torch.zeros(3, device="meta"), 2]}
    replay.remember(("key",), model, output)
    assert replay.output_of(("key",), model) is None  # it is not on
    replay.begin([])
    (first,), (second,) = replay.output_of(("key",), model) or [], replay.output_of(("key",), model) or []
    assert first["loss"].requires_grad
    assert not first["loss"].is_leaf
    first["loss"].add_(1)
    assert first["all"][0] is not second["all"][0]
    assert replay.output_of(("other",), model) is None
    assert not replay.skips  # the step runs as it is
    replay.end_step()
    assert replay.skips


def test_outputs_that_hold_more_than_tensors_are_not_remembered() -> None:
    model, replay = nn.Linear(3, 3), Replay()
    replay.begin([])
    for key, output in enumerate([object(), torch.zeros(3), (torch.zeros(3, device="meta"), object())]):
        replay.remember((key,), model, output)
        with torch.no_grad():
            assert replay.output_of((key,), model) is None
    assert replay.skips  # an evaluation that is not known leaves the steps as they are


def test_a_cache_that_a_model_returns_is_remembered() -> None:
    from transformers import DynamicCache
    from transformers.modeling_outputs import CausalLMOutputWithPast

    model, replay, cache = nn.Linear(3, 3), Replay(), DynamicCache()
    keys = torch.zeros(1, 2, 5, 4, device="meta")
    cache.update(keys, keys.clone(), 0)
    replay.begin([])
    output: Any = CausalLMOutputWithPast(logits=torch.zeros(3, device="meta"))
    output["past_key_values"] = cache
    replay.remember(("key",), model, output)
    found: Any = (replay.output_of(("key",), model) or [None])[0]
    assert found.logits.shape == (3,)
    assert found.past_key_values.get_seq_length() == 5
    assert found.past_key_values is not cache


def test_hooks_of_a_backward_pass_are_found() -> None:
    models = [nn.Linear(3, 3) for _ in range(4)]
    assert not has_backward_hooks(models)
    models[1].register_full_backward_hook(lambda *_: None)
    models[2].weight.register_hook(lambda _: None)
    models[3].weight.register_post_accumulate_grad_hook(lambda _: None)
    assert [has_backward_hooks([model]) for model in models] == [False, True, True, True]
