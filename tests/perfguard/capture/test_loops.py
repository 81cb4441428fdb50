"""A loop that is cut short holds at its end what the whole loop would: both are dry-run and compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfguard.capture import loaders, loops
from perfguard.capture.trial import capture
from perfguard.devices import resolve_device
from perfguard.graph import OpGraph
from tests.perfguard.capture.batches import ahead

A100 = resolve_device("a100")


def both(objective: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> tuple[OpGraph, OpGraph]:
    """The evaluation of ``objective``, cut short and whole."""
    cut = capture(objective, A100, spares=False).phases["the evaluation"]
    for module in (loaders, loops):
        monkeypatch.setattr(module, "ITERATIONS", math.inf)
    return cut, capture(objective, A100, spares=False).phases["the evaluation"]


def rows(number: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(number, 20), torch.randint(0, 3, (number,))), 32)


def evaluates(keeps: str, fetch: Callable[[Any], Iterator[Any]], make: Any = rows) -> None:
    model = nn.Sequential(nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 300)).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for x, y in rows(128):
        optimizer.zero_grad()
        F.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
    outputs, whole = [], torch.empty(0, 300).cuda()
    with torch.no_grad():
        for x, _ in fetch(make(20 * 32)):
            output = model(x.cuda()).softmax(-1)
            if keeps == "a joined tensor":
                whole = torch.cat([whole, output])
            elif keeps != "nothing":
                outputs.append(output.cpu() if keeps == "copies on the host" else output)
        if keeps == "a list that is joined":
            torch.cat(outputs).argmax(-1)


@pytest.mark.parametrize("fetch", [iter, ahead])
@pytest.mark.parametrize("keeps", ["nothing", "copies on the host", "a list", "a joined tensor", "a list that is joined"])
def test_evaluation_holds_the_outputs_of_all_its_batches(
    keeps: str, fetch: Callable[[Any], Iterator[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, whole = both(partial(evaluates, keeps, fetch), monkeypatch)
    assert len(cut.ops) < 0.3 * len(whole.ops)
    assert cut.peak_live_bytes == pytest.approx(whole.peak_live_bytes, abs=200)


def of_growing_length(number: int) -> DataLoader[Any]:
    def collate(samples: list[Any]) -> Any:
        lengths.append(len(lengths) + 1)
        return torch.stack([x for x, _ in samples])[:, None].expand(-1, lengths[-1], -1), 0

    lengths: list[int] = []
    return DataLoader(rows(number).dataset, 32, collate_fn=collate)


def test_longer_batches_are_nothing_that_is_kept() -> None:
    keeps_none = capture(partial(evaluates, "nothing", iter, of_growing_length), A100, spares=False).phases["the evaluation"]
    assert keeps_none.peak_live_bytes < 2**20  # 20 batches of outputs would be more
    keeps_all = capture(partial(evaluates, "a list", iter, of_growing_length), A100, spares=False).phases["the evaluation"]
    assert keeps_all.peak_live_bytes > 2**20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"use_cache": False}], ids=["greedy", "beams", "no cache"])
def test_generation_goes_on_to_its_longest_and_holds_keys_and_values_of_all_tokens(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once went on for ever: no value on the stage says that a sequence has ended."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    lengths = []

    def objective() -> None:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes)).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for (tokens,) in DataLoader(TensorDataset(torch.zeros(12, 8, dtype=torch.int64)), 4):
            optimizer.zero_grad()
            model(input_ids=tokens.cuda(), labels=tokens.cuda()).loss.backward()
            optimizer.step()
        prompts = torch.zeros(64, 8, dtype=torch.int64).cuda()
        found = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=16, pad_token_id=0, **options)
        lengths.append(found.shape[1])

    cut, whole = both(objective, monkeypatch)
    assert (len(cut.ops) < 0.5 * len(whole.ops)) == (options != {"use_cache": False})
    assert cut.peak_live_bytes == pytest.approx(whole.peak_live_bytes, rel=0.01)  # masks grow, too
    assert lengths == 2 * [8 + 16]
