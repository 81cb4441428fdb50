"""The order of the configurations, their recipes, and the batches that they get."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from perfguard import resolve_device
from perfguard.exceptions import TableError, WorkloadError
from perfguard.graph import trace
from perfguard_research.collect import SPACES, Draft, Recipe, Space, drafts, without_missing_packages
from perfguard_research.collect.plan import batch_at, planned
from tests import zoo
from tests.doubles import TOY_CPU

OWN: tuple[Space, ...] = ("mlp", "rnn", "nas", "ops")
"""Spaces that need no other package."""
MLP = {"inputs": 64, "width": 256, "depth": 3, "norm": False, "dropout": False, "activation": "relu", "classes": 10}


def first(number: int, spaces: tuple[Space, ...] = OWN, *, seed: int = 0, on_gpu: bool = True) -> list[Draft]:
    return list(itertools.islice(drafts(spaces, seed=seed, on_gpu=on_gpu), number))


def mlp(**changes: object) -> Recipe:
    recipe = Recipe(space="mlp", kind="mlp", model="mlp-3", family="mlp", sizes=MLP, batch_size=1)
    return dataclasses.replace(recipe, **changes)  # type: ignore[arg-type]


def test_every_prefix_has_as_many_rows_of_each_space() -> None:
    order = [draft.recipe.space for draft in first(60)]
    for length in range(1, len(order)):
        counts = Counter(order[:length])
        assert max(counts.values()) - min(counts[space] for space in OWN) <= 1


@pytest.mark.parametrize("length", [48, 96, 240])
def test_every_prefix_is_balanced_in_what_is_chosen(length: int) -> None:
    recipes = [draft.recipe for draft in first(length, ("mlp",))]
    shares: dict[str, tuple[Callable[[Recipe], bool], float]] = {
        "training": (lambda r: r.mode == "train", 2 / 3),
        "fp32": (lambda r: r.precision == "fp32", 1 / 2),
        "fp16": (lambda r: r.precision == "amp-fp16", 1 / 6),
        "TF32 for all": (lambda r: r.tf32 == "on", 1 / 6),
        "AdamW": (lambda r: r.optimizer == "adamw", 1 / 3),
        "cuDNN's benchmark": (lambda r: r.cudnn_benchmark, 1 / 2),
        "AdamW with fp32": (lambda r: r.optimizer == "adamw" and r.precision == "fp32", 1 / 6),
    }
    for name, (holds, expected) in shares.items():
        share = sum(map(holds, recipes)) / length
        assert share == pytest.approx(expected, abs=0.06), name


def test_some_memory_shares_are_above_one() -> None:
    """A part of the configurations asks for more than there is."""
    shares = [draft.memory_share for draft in first(256)]
    assert 0.08 < sum(share > 1 for share in shares) / len(shares) < 0.22
    assert 0.02 <= min(shares) < 0.03
    assert 1.25 < max(shares) <= 1.3


def test_a_seed_is_an_order() -> None:
    assert first(20) == first(20)
    assert [draft.recipe for draft in first(20)] != [draft.recipe for draft in first(20, seed=1)]


def test_drafts_on_cpu_have_no_gpu_options() -> None:
    recipes = [draft.recipe for draft in first(200, on_gpu=False)]
    assert not any(r.cudnn_benchmark or r.compiled or r.tf32 != "default" or r.precision == "amp-fp16" for r in recipes)


def test_space_with_missing_package_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "timm", "torchvision"):
        monkeypatch.setitem(sys.modules, name, None)
    left, lines = without_missing_packages(["vision", "text", "mlp"])
    assert left == ["vision", "mlp"]
    assert lines[0] == "The space text is left out: transformers cannot be imported."
    assert len(lines) == 3
    assert {draft.recipe.kind for draft in first(10, ("vision",))} == {"cnn"}


@pytest.mark.skipif(not zoo.IS_COMPLETE, reason="needs timm, torchvision and transformers")
def test_recipe_survives_json_and_can_be_traced() -> None:
    for draft in first(24, SPACES):
        recipe = Recipe.from_json(dataclasses.replace(draft.recipe, batch_size=2).to_json())
        assert recipe == dataclasses.replace(draft.recipe, batch_size=2)
        with torch.device("meta"):
            graph = trace(recipe.workload(recipe.make_model()), target="cuda")
        assert graph.mode == recipe.mode
        assert graph.peak_live_bytes > 0


def test_checkpointing_spares_activations() -> None:
    def peak(recipe: Recipe) -> int:
        with torch.device("meta"):
            return trace(recipe.workload(recipe.make_model())).peak_live_bytes

    sizes = MLP | {"depth": 8, "norm": True, "activation": "gelu"}
    assert peak(mlp(batch_size=8192, sizes=sizes, checkpointing=True)) < 0.6 * peak(mlp(batch_size=8192, sizes=sizes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "pickle"}, "kind must be timm, torchvision"),
        ({"optimizer": None}, "optimizer must be sgd, sgd-momentum, adamw, but is None"),
        ({"mode": "infer"}, "optimizer must be None, but is 'sgd-momentum'"),
        ({"batch_size": 0}, "batch_size must be a positive integer"),
        ({"precision": "int4"}, "precision must be fp32"),
    ],
)
def test_a_recipe_that_cannot_be_right_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TableError, match=message):
        mlp(**changes)


def test_recipe_names_network_that_cannot_be_made() -> None:
    with pytest.raises(WorkloadError, match=r"The network mlp .* cannot be made: KeyError: 'width'"):
        mlp(sizes={"inputs": 3, "depth": 1}).make_model()
    with pytest.raises(TableError, match="must be a configuration as `perfguard collect` writes it"):
        Recipe.from_json('{"space": "mlp"')


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("timm", {"name": "hf-hub:somebody/network", "img_size": 224}, "'hf-hub:somebody/network' is no architecture of timm's"),
        (
            "huggingface",
            {"model_type": "bert", "architecture": "pipeline", "config": {}},
            "'pipeline' is not bert's architecture",
        ),
    ],
)
@pytest.mark.skipif(not zoo.IS_COMPLETE, reason="needs timm and transformers")
def test_a_table_cannot_have_things_fetched_or_called(kind: str, sizes: dict[str, object], message: str) -> None:
    recipe = Recipe(space="vision", kind=kind, model="m", family="f", sizes=sizes, batch_size=1)
    with pytest.raises(WorkloadError, match=message):
        recipe.make_model()


@pytest.mark.parametrize("target", [50.0, 1e3, 1e4, 3e6])
def test_batch_at_finds_batch_of_convex_cost(target: float) -> None:
    asked: list[int] = []

    def cost(batch_size: int) -> float:
        asked.append(batch_size)
        return max(40.0 + batch_size, 3.0 * batch_size)

    batch_size = batch_at(target, cost)
    assert cost(batch_size) == pytest.approx(target, rel=0.12)
    assert len(set(asked)) <= 6


def test_batch_at_clamps_cost_never_reached() -> None:
    """It takes the smallest or the largest batch."""
    assert batch_at(1.0, lambda batch_size: 10.0 * batch_size) == 2
    assert batch_at(1e9, lambda batch_size: 7.0) == 2**20


def test_a_plan_takes_the_wanted_share_of_the_memory() -> None:
    device = resolve_device("t4")
    draft = Draft(0, mlp(), memory_share=0.25, round_batch=True, long=False)
    recipe = planned(draft, device, device.memory_bytes).recipe
    assert recipe is not None
    with torch.device("meta"):
        peak = trace(recipe.workload(recipe.make_model()), target=device).peak_live_bytes + device.context_bytes
    assert peak == pytest.approx(0.25 * device.memory_bytes, rel=0.06)
    assert recipe.batch_size % 16 == 0


def test_plan_cuts_long_steps_unless_they_should_fail() -> None:
    device = resolve_device("t4")
    slow = mlp(sizes=MLP | {"width": 8192, "depth": 16})

    def batch(share: float) -> int:
        recipe = planned(Draft(0, slow, share, False, False), device, device.memory_bytes).recipe
        assert recipe is not None
        return recipe.batch_size

    assert batch(0.9) < 0.8 * batch(1.1)


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_plan_on_cpu_has_no_long_step(share: float) -> None:
    slow, huge = (mlp(sizes=MLP | {"width": width, "depth": 16}) for width in (512, 8192))
    recipe = planned(Draft(0, slow, share, False, False), TOY_CPU, 2**30).recipe
    assert recipe is not None
    assert recipe.batch_size < 2000  # 30 ms at 100 GFLOP/s
    plan = planned(Draft(0, huge, share, False, False), TOY_CPU, 2**40)
    assert (plan.recipe, plan.reason) == (None, "a step would take too long on a CPU")


def test_plan_gives_reason_for_untraceable_recipe() -> None:
    device = resolve_device("t4")
    plan = planned(Draft(0, mlp(sizes={"inputs": 3, "depth": 1}), 0.5, False, False), device, device.memory_bytes)
    assert plan.recipe is None
    assert "cannot be made: KeyError: 'width'" in plan.reason
