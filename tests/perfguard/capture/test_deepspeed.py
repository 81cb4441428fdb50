"""DeepSpeed's real engine in a dry run."""

from __future__ import annotations

import functools
import importlib.util
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from perfguard.capture.deepspeed_engine import _Kernels
from perfguard.capture.ranks import torchrun_variables
from perfguard.exceptions import CaptureError
from perfguard.graph import Phase, StorageKind
from perfguard.unmodelled import HOST_OPTIMIZER
from tests.perfguard.capture import toy_deepspeed
from tests.perfguard.capture.toy_allocated import allocated_bytes
from tests.perfguard.capture.toy_deepspeed import train
from tests.perfguard.capture.toy_ranks import bytes_of, in_a_child, language_model
from tests.warm import run_warm

pytestmark = [
    pytest.mark.slow,  # it takes some seconds to import
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
]
NUM_PARAMETERS = sum(parameter.numel() for parameter in language_model().parameters())


dry_run = functools.partial(in_a_child, gpu="h100")


@pytest.fixture(scope="module")
def imported() -> None:
    """Import it once, instead of in each dry run. An import takes four seconds of processor time."""
    importlib.import_module("deepspeed")


@pytest.fixture
def of_two(monkeypatch: pytest.MonkeyPatch, imported: None) -> None:
    for name, value in torchrun_variables(2).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("stage", [2, 3])
def test_peak_is_that_of_real_tensors(stage: int, of_two: None) -> None:
    graph = dry_run(lambda: train(stage)).graph
    assert graph.peak_live_bytes == pytest.approx(allocated_bytes(f"DeepSpeed ZeRO {stage}", 2), rel=0.001)
    assert "deepspeed" in graph.options
    assert {"allreduce_", "_allgather_base_"} & {op.name for op in graph.ops}


def test_it_may_be_imported_first_in_the_dry_run(of_two: None) -> None:
    """Its accelerator is then chosen on the stage. The process that captures has not imported it, unlike this one."""
    status, printed = run_warm("-m", toy_deepspeed.__name__, cwd=Path.cwd(), timeout_s=300)
    assert status == 0, printed
    assert {"allreduce_", "_allgather_base_"} & {*printed.split()}


@pytest.mark.parametrize("settings", [{"two_groups": True}, {"sub_group_size": 500_000}])
def test_a_step_of_several_groups_is_one(settings: dict[str, Any], of_two: None) -> None:
    captured = dry_run(lambda: train(3, **settings))
    names = Counter(op.name for op in captured.graph.ops)
    assert names["embedding"] == 1
    assert names["_foreach_addcdiv_"] > 1


def test_what_is_offloaded_is_not_on_the_gpu(of_two: None) -> None:
    there = dry_run(lambda: train(2, own_optimizer=False))
    offloaded = dry_run(lambda: train(2, own_optimizer=False, offload_optimizer={"device": "cpu"}))
    shard = NUM_PARAMETERS / 2  # of which there are a master weight and two states, in float32
    assert bytes_of(there, StorageKind.OPTIMIZER_STATE) == pytest.approx(12 * shard, rel=0.001)
    assert bytes_of(offloaded, StorageKind.OPTIMIZER_STATE) < 1000
    updates = [op for op in there.graph.ops if op.name == "fused_optimizer_"]
    assert [op.bytes_written for op in updates] == [pytest.approx(12 * shard, rel=0.001)]
    assert HOST_OPTIMIZER in offloaded.graph.unmodelled
    assert HOST_OPTIMIZER not in there.graph.unmodelled


def test_torchs_own_optimizer_may_be_on_the_host(of_two: None) -> None:
    offloaded = dry_run(lambda: train(2, offload_optimizer={"device": "cpu"}))
    assert bytes_of(offloaded, StorageKind.OPTIMIZER_STATE) < 1000
    assert not [op.name for op in offloaded.graph.ops if op.phase is Phase.OPTIMIZER and op.name.startswith("_foreach")]


def test_model_is_sharded_where_it_is_made(of_two: None) -> None:
    importlib.import_module("deepspeed")  # before the dry run, on a machine without a GPU

    def run(*, early: bool) -> None:
        import deepspeed

        with deepspeed.zero.Init(
            config_dict_or_path={"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}}, enabled=early
        ):
            model = language_model()
        train(3, model=model)

    early, late = (dry_run(functools.partial(run, early=early)).graph for early in (True, False))
    assert early.peak_live_bytes == pytest.approx(late.peak_live_bytes, rel=0.001)


def test_groups_of_several_engines_step_together(of_two: None) -> None:
    def objective() -> None:
        for _ in range(2):  # as for two folds
            train(2, two_groups=True)

    captured = dry_run(objective)
    assert captured.num_optimizers == 2
    assert captured.steps is None  # the second fold's optimizer has counted its own steps alone
    assert {op.phase for op in captured.graph.ops} == set(Phase)


def test_pretrained_model_is_sharded_and_saved(of_two: None, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path / "model")
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    settings = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "zero_optimization": zero}
    data = [{"input_ids": torch.zeros(32, dtype=torch.int64), "labels": torch.zeros(32, dtype=torch.int64)}] * 40

    def objective(*, reads: bool) -> None:
        arguments = transformers.TrainingArguments(
            str(tmp_path / "out"), per_device_train_batch_size=2, num_train_epochs=1, deepspeed=settings, report_to=[]
        )
        llama = transformers.LlamaForCausalLM
        model = llama.from_pretrained(tmp_path / "model") if reads else llama(transformers.LlamaConfig(**sizes))
        transformers.Trainer(model, arguments, train_dataset=data).train()

    read, made = (dry_run(functools.partial(objective, reads=reads)) for reads in (True, False))
    assert (read.steps, read.unseen) == (10, "")
    assert read.graph.peak_live_bytes == made.graph.peak_live_bytes


def test_kernel_that_is_not_known_is_an_error() -> None:
    with pytest.raises(CaptureError, match="DeepSpeed's kernel lamb cannot be dry-run"):
        _Kernels().lamb(torch.ones(4))


@pytest.mark.parametrize("first", ["init_distributed", "train"])
def test_number_of_processes_is_asked_for(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in torchrun_variables(2):
        monkeypatch.delenv(name, raising=False)

    def run() -> None:
        import deepspeed

        deepspeed.init_distributed() if first == "init_distributed" else train(1)

    with pytest.raises(CaptureError, match="State their number: perfguard dry-run --world-size 8"):
        dry_run(run)


def test_on_a_cpu_it_is_refused(of_two: None) -> None:
    with pytest.raises(CaptureError, match=r"DeepSpeed on a CPU cannot be dry-run\. Name a GPU"):
        dry_run(lambda: train(1), gpu="cpu")
