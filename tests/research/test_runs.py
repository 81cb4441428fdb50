"""The table of measured runs: each prefix builds and traces, and what is not modelled says so in one sentence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from perfguard import load_predictor
from perfguard.devices import resolve_device
from perfguard.exceptions import TableError
from perfguard.graph import OpGraph, Phase, StorageKind, TraceCache
from perfguard.workload import Workload
from perfguard_research.evaluate import evaluate, report
from perfguard_research.tables import MeasuredRow, parser_of
from tests import zoo
from tests.doubles import ReplayPredictor
from tests.rows import RUN_COLUMNS, SIZES

ROW = dict.fromkeys(RUN_COLUMNS, "") | {
    "source": "ours", "model": "perfguard:mlp", "config": json.dumps(SIZES), "mode": "train", "gpu": "a100-sxm-80gb",
    "num_gpus": "1", "parallel": "none", "batch_size": "2", "optimizer": "adamw",
}  # fmt: skip
needs_packages = pytest.mark.skipif(not zoo.IS_COMPLETE, reason="needs timm, torchvision and transformers")
WORDS = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
BASICS = {"vocab_size": 100, "context_length": 16, "d_model": 32, "num_layers": 2, "num_heads": 2, "d_ff": 64}
IMAGE, TOKENS, BOTH = {"image": 64}, {"seq_len": 16}, {"seq_len": 16, "target_len": 8}
T5 = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 100, "decoder_start_token_id": 0}
VIT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64}


def run_row(row: dict[str, str]) -> MeasuredRow:
    return parser_of(RUN_COLUMNS, "runs.csv")(row)


def row_of(model: str = "perfguard:mlp", config: Any = SIZES, given: Any = None, **changes: str) -> MeasuredRow:
    return run_row(ROW | {"model": model, "config": json.dumps(config), "input": json.dumps(given or {})} | changes)


def graph_of(row: MeasuredRow) -> OpGraph:
    return row.graph(row.make_model(), TraceCache(), resolve_device(row.gpu))


def workload_of(row: MeasuredRow) -> Workload:
    model = row.make_model()
    assert isinstance(model, nn.Module)
    return row.workload(model)


@needs_packages
@pytest.mark.parametrize("mode", ["train", "forward_backward", "infer"])
@pytest.mark.parametrize(
    ("model", "config", "given"),
    [
        ("torchvision:resnet18", {"num_classes": 10}, IMAGE),
        ("torchvision:googlenet", {}, {"image": [64, 96]}),
        ("torchvision:regnet_x_400mf", {}, IMAGE),
        ("timm:resnet18", {"num_classes": 10}, IMAGE),
        ("kuangliu:ResNet18", {"num_classes": 10}, {"image": 32}),
        ("hf:BertForSequenceClassification", WORDS, TOKENS),
        ("hf:BertForQuestionAnswering", WORDS, TOKENS),
        ("hf:BertModel", WORDS, TOKENS),
        ("hf:GPT2LMHeadModel", {"n_embd": 32, "n_head": 2, "n_layer": 2, "vocab_size": 100}, TOKENS),
        ("hf:T5ForConditionalGeneration", T5, BOTH),
        ("hf:ViTForImageClassification", VIT, IMAGE),
        ("hf:meta-llama/Llama-2-7b-hf", WORDS, TOKENS),
        ("cs336:BasicsTransformerLM", BASICS, TOKENS),
    ],
)
def test_each_prefix_builds_and_traces(model: str, config: Any, given: Any, mode: str) -> None:
    graph = graph_of(row_of(model, config, given, mode=mode))
    phases = {op.phase for op in graph.ops}
    backward = {Phase.FORWARD, Phase.BACKWARD}
    assert phases == {"infer": {Phase.FORWARD}, "forward_backward": backward, "train": {*backward, Phase.OPTIMIZER}}[mode]
    assert graph.mode == ("infer" if mode == "infer" else "train")


@needs_packages
@pytest.mark.parametrize(
    ("model", "config", "expected"),
    [
        ("kuangliu:ResNet18", {"num_classes": 10}, 11_173_962),  # printed by the original's own test
        ("hf:meta-llama/Llama-2-7b-hf", WORDS | {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                                                 "num_attention_heads": 32, "vocab_size": 32000}, 6_738_415_616),
    ],
)  # fmt: skip
def test_a_network_has_the_parameters_of_the_original(model: str, config: Any, expected: int) -> None:
    row = row_of(model, config, {"image": 32, "seq_len": 16})
    assert sum(parameter.numel() for parameter in workload_of(row).model.parameters()) == expected


@needs_packages
@pytest.mark.parametrize(
    ("name", "family", "cls"),
    [
        ("microsoft/Phi-3-mini-4k-instruct", "phi", "Phi3ForCausalLM"),
        ("google/gemma-2-9b", "gemma2", "Gemma2ForCausalLM"),
        ("somebody/tuned-7b", "llama", "LlamaForCausalLM"),
    ],
)
def test_a_hub_id_has_the_class_of_its_family(name: str, family: str, cls: str) -> None:
    config = WORDS | {"vocab_size": 40_000}  # the token that pads must be a word
    assert type(row_of(f"hf:{name}", config, family=family).make_model()).__name__ == cls


@needs_packages
@pytest.mark.parametrize(("model", "config", "given"), [("hf:LlamaForCausalLM", WORDS, TOKENS), ("perfguard:mlp", SIZES, {})])
def test_checkpointing_computes_forward_twice(model: str, config: Any, given: Any) -> None:
    plain, again = (graph_of(row_of(model, config, given, checkpointing=value)) for value in ("False", "True"))
    assert again.flops > 1.1 * plain.flops


def test_forward_backward_is_training_without_the_optimizer() -> None:
    for precision in ("fp32", "amp-bf16"):
        both = (graph_of(row_of(mode=mode, precision=precision)) for mode in ("train", "forward_backward"))
        train, without = ([op.name for op in graph.ops if op.phase is not Phase.OPTIMIZER] for graph in both)
        assert without == train


@pytest.mark.parametrize(("mode", "loss"), [("train", "nll_loss_forward"), ("forward_backward", "mean")])
def test_course_model_has_cross_entropy_with_its_optimizer_and_the_mean_without(mode: str, loss: str) -> None:
    """So the notes of its rows say."""
    ops = graph_of(row_of("cs336:BasicsTransformerLM", BASICS, TOKENS, mode=mode)).ops
    assert loss in [op.name for op in ops if op.phase is Phase.FORWARD][-2:]


@pytest.mark.parametrize(
    ("written", "precision", "tf32"),
    [("fp32", "fp32", "off"), ("tf32", "fp32", "on"), ("tf32-conv", "fp32", "default"), ("amp-bf16", "amp-bf16", "default")],
)
def test_the_precision_column_says_where_tf32_is_used(written: str, precision: str, tf32: str) -> None:
    workload = workload_of(row_of(precision=written))
    assert (workload.precision, workload.tf32) == (precision, tf32)


def test_what_a_row_says_is_what_runs() -> None:
    row = row_of(
        parallel="ddp", num_gpus="8", accumulation="3", layout="nhwc", compiled="True", cudnn_benchmark="True",
        optimizer="fused-adam",
    )  # fmt: skip
    workload = workload_of(row)
    assert (workload.accumulation, workload.layout, workload.ddp) == (3, "nhwc", True)
    assert workload.options == ("cudnn_benchmark", "compiled", "ddp", "batch-on-device", "no-tf32")
    assert "fused_optimizer_" in {op.name for op in graph_of(row).ops}


@pytest.mark.parametrize(
    ("framework", "foreach"), [("torch1.4-cu100", False), ("ngc-21.03", False), ("torch2.6", None), ("", None)]
)
def test_old_optimizers_go_from_parameter_to_parameter(framework: str, foreach: bool | None) -> None:
    optimizer = workload_of(row_of(framework=framework)).optimizer
    assert getattr(optimizer, "keywords", {}).get("foreach") is foreach


@pytest.mark.parametrize("kind", ["driver", "driver-minus-context", "reserved", "allocated", "unknown"])
def test_memory_is_predicted_and_scored_in_the_kind_of_the_row(kind: str) -> None:
    rows = [ROW | {"memory_kind": kind, "peak_memory_mib": "100"}]
    (result,) = evaluate(RUN_COLUMNS, rows, "runs.csv", load_predictor())
    assert result.prediction is not None
    assert result.row is not None
    graph, context_bytes = graph_of(result.row), resolve_device("a100-sxm-80gb").context_bytes
    driver_bytes = result.prediction.peak_memory.median
    expected = {"driver-minus-context": driver_bytes - context_bytes, "reserved": driver_bytes - context_bytes,
                "allocated": graph.peak_live_bytes}.get(kind, driver_bytes)  # fmt: skip
    columns = result.columns()
    low, median, high = (float(columns[f"pred_{name}_mib"]) for name in ("memory_low", "peak_memory", "memory_high"))
    assert median == pytest.approx(expected / 2**20, rel=1e-4)
    assert low < median < high
    (group,) = report([result])
    error = None if kind == "unknown" else pytest.approx(abs(median / 100 - 1), rel=1e-3)
    assert (group["memory"] and group["memory"]["mean"]) == error


@pytest.mark.parametrize("kind", ["driver", "driver-minus-context", "reserved", "allocated", "unknown"])
def test_predictors_learn_from_the_drivers_reading_alone(kind: str) -> None:
    row = row_of(memory_kind=kind, peak_memory_mib="100")
    compared = {"driver": 100 * 2**20, "driver-minus-context": 100 * 2**20 + row.device.context_bytes}
    assert row.peak_memory_bytes == compared.get(kind)


@pytest.mark.parametrize(
    ("note", "host"),
    [
        ("batch worked out; results/2080ti(2)", "results/2080ti(2)"),
        ("old_results/lab/T4/data", "old_results/lab/T4/data"),
        ("median of 3 results", ""),
    ],
)
def test_a_folder_of_results_at_the_end_of_the_note_names_the_machine(note: str, host: str) -> None:
    assert run_row(ROW | {"note": note}).host == host


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": "fsdp-full", "num_gpus": "8"}, r"sharded over 8 GPUs is not modelled \(fsdp-full\)"),
        ({"optimizer": "lamb"}, "The optimizer 'lamb' is not modelled"),
        ({"note": '{"method": "qlora", "r": 8}'}, "Fine-tuning by qlora is not modelled"),
        ({"model": "keras:Dense"}, "'keras:Dense' has no known prefix. Known are torchvision, timm, hf"),
        ({"model": "kuangliu:ResNet18", "checkpointing": "True"}, "Checkpointing of 'kuangliu:ResNet18' is not modelled"),
        ({"config": '{"depth": 1}'}, "The model 'perfguard:mlp' cannot be made: KeyError"),
    ],
)
def test_what_is_not_modelled_says_so(changes: dict[str, str], message: str) -> None:
    row = run_row(ROW | changes)
    with pytest.raises(TableError, match=message):
        row.make_model()


@needs_packages
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("torchvision:detection.retinanet_resnet50_fpn", "A detection model of torchvision is not modelled"),
        ("hf:TransfoXLLMHeadModel", "transformers .* has no model 'TransfoXLLMHeadModel'"),
        ("hf:AutoModel", "transformers .* has no model 'AutoModel'"),
        ("timm:hf-hub:somebody/net", "no architecture of timm's"),
        ("torchvision:resnet19", "The model 'torchvision:resnet19' cannot be made: ValueError"),
    ],
)
def test_a_model_that_cannot_be_built_says_why(model: str, message: str) -> None:
    with pytest.raises(TableError, match=message):
        row_of(model, {}, IMAGE).make_model()


def test_one_half_of_an_autoencoder_runs_beside_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class Autoencoder(nn.Module):
        def __init__(self, latent_channels: int) -> None:
            super().__init__()
            self.down, self.up = nn.Conv2d(3, latent_channels, 8, 8), nn.ConvTranspose2d(latent_channels, 3, 8, 8)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return cast("torch.Tensor", self.down(x))

        def decode(self, x: torch.Tensor) -> torch.Tensor:
            return cast("torch.Tensor", self.up(x))

    monkeypatch.setitem(sys.modules, "diffusers", SimpleNamespace(Autoencoder=Autoencoder))
    for half, given, channels in (("encode", {"image": 64}, 4), ("decode", {"latent": 8}, 3)):
        graph = graph_of(row_of(f"diffusers:Autoencoder.{half}", {"latent_channels": 4}, given, mode="infer"))
        assert [op.shape[1] for op in graph.ops if op.kind == "conv"] == [channels]
        assert graph.bytes_by_kind()[StorageKind.PARAMETER] == 4 * (2 * 3 * 4 * 64 + 3 + 4)  # of both
    with pytest.raises(TableError, match="diffusers has no network 'Autoencoder"):
        row_of("diffusers:Autoencoder.train", {"latent_channels": 4}).make_model()


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("diffusers", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    for model, package in (("diffusers:UNet2DConditionModel", "diffusers"), ("hf:BertModel", "transformers")):
        with pytest.raises(TableError, match=f"from {package}, which is not installed: pip install {package}"):
            row_of(model).make_model()


def test_an_input_that_does_not_fit_is_named() -> None:
    row = row_of("cs336:BasicsTransformerLM", BASICS, IMAGE)
    with pytest.raises(TableError, match="column 'input' must hold 'seq_len' for 'cs336:BasicsTransformerLM'"):
        graph_of(row)


def test_a_table_is_evaluated_row_by_row(tmp_path: Path) -> None:
    rows = [
        ROW | {"gpu": "a100-sxm-80gb/3g.40gb", "step_time_ms": "3"},
        ROW | {"gpu": "a100-sxm-80gb/3g.30gb"},
        ROW | {"parallel": "fsdp-full", "num_gpus": "8"},
    ]
    results = evaluate(RUN_COLUMNS, rows, tmp_path / "runs.csv", ReplayPredictor())
    assert results[0].device is not None
    assert results[0].device.id == "a100-sxm-80gb:3g.40gb"
    assert results[0].columns()["pred_step_time_ms"]
    assert "has no MIG profile '3g.30gb'" in results[1].error
    assert "sharded over 8 GPUs" in results[2].error
