"""`perfguard plan train.py --gpus 8xh100 --try --micro-batch 1,2,4 --accumulate 4,2,1`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perfguard.cli import main
from perfguard.cli.plan import _ways_in_words
from perfguard.cli.script import capture_script

TRAINING = """
import argparse
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--micro-batch", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--width", type=int, default=64)
words = parser.parse_args()
if words.micro_batch == 8:
    raise RuntimeError("eight is too many")
model = nn.Sequential(nn.Embedding(100, words.width), nn.Linear(words.width, 100)).cuda()
if GROUP:
    dist.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for number, (x,) in enumerate(DataLoader(TensorDataset(torch.randint(0, 100, (160, 16))), words.micro_batch), 1):
    x = x.cuda()
    (nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()) / words.accumulate).backward()
    if number % words.accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

tokens = torch.randint(0, 100, (16,))
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
arguments = TrainingArguments(
    "out", per_device_train_batch_size=2, num_train_epochs=1, bf16=True, report_to=[], disable_tqdm=True, save_strategy="no"
)
model = LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes))
Trainer(model=model, args=arguments, train_dataset=[{"input_ids": tokens, "labels": tokens}] * 64).train()
"""
Plan = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Run the command on a script that makes a group of processes, or none: its exit status, and its JSON."""
    monkeypatch.chdir(tmp_path)

    def run(gpus: str, *words: str, text: str = TRAINING) -> tuple[int, dict[str, Any]]:
        Path("train.py").write_text(text.replace("GROUP", str("x" in gpus)))
        status = main(["plan", "train.py", "--gpus", gpus, "--json", *words])
        return status, json.loads(capsys.readouterr().out)

    return run


def ways_of(document: dict[str, Any], *results: str) -> list[str]:
    return [row["way"] for row in document["ways"] if row["result"] in results]


# --- What is tried --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["--n 1,2", "--n {1,2}", "--n 1 2", "--n 1, 2"])
def test_values_may_be_spelt_as_a_shell_leaves_them(spelling: str) -> None:
    ways = [["--lr", "1"], ["--lr", "1", "--n", "1"], ["--lr", "1", "--n", "1", "--c"], ["--lr", "1", "--n", "2"]]
    assert _ways_in_words([*spelling.split(), "--c"], ["--lr", "1"]) == [*ways, ["--lr", "1", "--n", "2", "--c"]]
    assert _ways_in_words(["a.b=1,2"], []) == [[], ["a.b=1"], ["a.b=2"]]
    assert _ways_in_words(["--n=1", "--n=2"], []) == [[], ["--n=1"], ["--n=2"]]  # as bash expands --n={1,2}


# --- What is found --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ways_that_learn_the_same_are_compared_and_others_are_left_out(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    status, document = plan("2xa100-80gb", "--price-per-hour", "3.6", "--try", "--micro-batch", "1,4", "--accumulate", "2,8")
    assert status == 0
    fit = ["as it stands = --micro-batch 4 --accumulate 2", "--micro-batch 1 --accumulate 8"]
    assert ways_of(document, "fits") == fit
    others = {row["way"]: row["samples_per_step"] for row in document["ways"] if row["result"] == "learns otherwise"}
    assert others == {"--micro-batch 1 --accumulate 2": 4, "--micro-batch 4 --accumulate 8": 64}
    best = document["ways"][0]
    step_s = best["step_time_s"]["median"]
    assert best["samples_per_step"] == 4 * 2 * 2
    assert best["samples_per_s"] == pytest.approx(16 / step_s)
    assert best["tokens_per_s"] == pytest.approx(16 * 16 / step_s)
    assert best["steps"] == 20  # of 160 samples, without a DistributedSampler
    assert best["cost"] == pytest.approx(2 * 3.6 / 3600 * 20 * step_s)
    assert best["cost_of_million_tokens"] == pytest.approx(1e6 / 256 * 2 * 3.6 / 3600 * step_s)
    assert best["mfu"] == pytest.approx(best["flops"] / 19.5e12 / step_s)  # in float32
    assert main(["dry-run", "train.py", "--gpu", "a100-80gb", "--world-size", "2", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert {name: best[name] for name in ("peak_memory_bytes", "step_time_s", "steps")} == {
        name: alone[name] for name in ("peak_memory_bytes", "step_time_s", "steps")
    }


@pytest.mark.slow
def test_one_way_that_fails_is_listed_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAINING.replace("GROUP", "False"))
    assert main(["plan", "train.py", "--gpus", "a100", "--try", "--micro-batch", "8,2", "--accumulate", "4"]) == 0
    printed = capsys.readouterr().out
    assert "--micro-batch 2 --accumulate 4" in printed
    assert (
        "left out: a100, --micro-batch 8 --accumulate 4: the dry run of train.py ends at train.py:14 with RuntimeError" in printed
    )
    assert "fastest that fits: python train.py\n" in printed


@pytest.mark.slow
def test_exit_status_is_that_of_check(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    status, document = plan("a100", "--max-memory", "4GiB", "--", "--width", "40000000")
    assert (status, ways_of(document, "does not fit")) == (1, ["as it stands"])
    assert "Name words to try: --try" in document["notes"][-1]
    status, document = plan("2xa100", text=TRAINING.replace("GROUP", "False"))
    assert (status, document["ways"][0]["reason"]) == (3, "the script trains on 1 GPUs: give --gpus a100")
    status, document = plan("a100", "--samples-per-step", "7", "--try", "--micro-batch", "1,2")
    assert (status, ways_of(document, "learns otherwise")) == (3, ["as it stands", "--micro-batch 1", "--micro-batch 2"])
    calls = iter([False, True])

    def interrupted(*args: Any, **options: Any) -> Any:
        if next(calls):
            raise KeyboardInterrupt
        return capture_script(*args, **options)

    monkeypatch.setattr("perfguard.cli.plan.capture_script", interrupted)
    status, document = plan("a100", "--try", "--micro-batch", "2", "--accumulate", "4")
    assert (status, ways_of(document, "fits")) == (130, ["as it stands"])
    assert document["notes"][-1].startswith("Interrupted")


@pytest.mark.slow
def test_trainer_is_tried_with_all_that_leaves_the_samples_of_a_step_alone(plan: Plan) -> None:
    for library in ("transformers", "accelerate"):
        pytest.importorskip(library)
    status, document = plan("2xa100-80gb", text=TRAINER)
    rows = {row["way"]: row for row in document["ways"]}
    assert status == 0
    assert set(rows) == {"micro-batch 2 x 1 (as it stands)"} | {
        f"micro-batch {size}{checkpointing}{sharded}"
        for size in ("2 x 1", "1 x 2")
        for checkpointing in ("", ", checkpointing")
        for sharded in ("", ", sharded")
    } - {"micro-batch 2 x 1"}
    assert {(row["result"], row["samples_per_step"]) for row in rows.values()} == {("fits", 4)}
    assert {round(row["tokens_per_s"] / row["samples_per_s"]) for row in rows.values()} == {16}
    both = rows["micro-batch 1 x 2, checkpointing, sharded"]
    assert both["arguments"] == {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"version": 2},
    }
    assert both["flops"] > rows["micro-batch 1 x 2, sharded"]["flops"]
    assert both["mfu"] < rows["micro-batch 1 x 2, sharded"]["mfu"]  # what is computed again is no work of the model
    assert not Path("out").exists()


# --- Wrong usage ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.py"], "Expected a training script that exists, such as train.py, but got 'missing.py'"),
        (["train.py:build"], "Expected a training script that exists"),
        (["train.py", "--gpus", "8xh1000"], "Did you mean 'h100'"),
        (["train.py", "--gpus", "0xh100"], "gpu must be a name from the catalog"),
        (["train.py", "--gpus", ","], "--gpus must name GPUs, for instance 8xh100"),
        (["train.py", "--gpus", "a100", "--price-per-hour", "1,2"], "--price-per-hour has 2 prices for 1 sets of GPUs"),
        (["train.py", "--gpus", "a100", "--max-memory", "90GiB"], "is more than NVIDIA A100"),
        (["train.py", "--gpus", "a100", "--risk", "2"], "risk must lie in"),
        (["train.py", "--gpus", "a100", "--try", "8"], "--try takes words with the values to try"),
        (["train.py", "--try", "--n", "1,2", "--gpus", "a100"], "--gpus follows --try, .* Put --try last"),
        (["train.py", "--gpus", "a100", "--try", "--n", "1,2,3,4", "--m", "1,2,3,4", "--k", "1,2,3,4"], "makes 65 combinations"),
        (["train.py", "--gpus", "a100", "--allow-8bit", "--try", "--n", "1,2"], "--allow-8bit is for a script of Hugging Face"),
    ],
)
def test_wrong_usage_is_explained(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAINING)
    assert main(["plan", *words]) == 2
    assert re.search(message, capsys.readouterr().err)
