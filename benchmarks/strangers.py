"""What strangers found in the numbers of 2026-11-24, measured again: half precision, LoRA, and a step of 3.4 billion parameters.

    python benchmarks/strangers.py peft.csv.gz

The table is PEFT's method comparison (`fine_tuning.py`), from which the ratio of measured step times comes.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from _record import parser_of, show
from fine_tuning import GPU, trained
from optuna.study import StudyDirection
from snapshots import SIZES

from perfguard import Estimate, Prediction, load_predictor, resolve_device, trace
from perfguard.devices import catalog
from perfguard_optuna.capture import ObjectiveBuild
from perfguard_research.tables import MIB, run_row

_IMAGE, _TEXT = {"image": 224}, {"seq_len": 512}
_LLAMA = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "tie_word_embeddings": True,
}  # fmt: skip
_NETWORKS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, int]]] = {
    "ViT-B/16": ("torchvision:vit_b_16", {}, _IMAGE),
    "BERT": ("hf:BertForMaskedLM", {}, _TEXT),
    "GPT-2": ("hf:GPT2LMHeadModel", {}, _TEXT),
    "Llama 3.2 1B": ("hf:LlamaForCausalLM", _LLAMA, _TEXT),
}
_CARDS = ("t4", "a100-sxm-80gb", "h100-sxm-80gb", "rtx4090", "rtx5090", "l40s")
_SETTINGS = tuple(itertools.product(("train", "infer"), ("amp-fp16", "amp-bf16", "fp16", "bf16")))
_LENGTH = 210
"""Tokens of a sample. The table says 840 in a step of four samples, on average; peaks of memory are those of longer ones."""
_ADAPTERS: Mapping[str, Any] = {
    "LoRA of the attention": {"peft_type": "LORA", "r": 32, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"]},
    "LoRA of the MLP": {"peft_type": "LORA", "r": 10, "lora_alpha": 20, "target_modules": ["up_proj", "gate_proj", "down_proj"]},
}


def predicted(gpu: str, model: str, config: Mapping[str, Any], size: Mapping[str, int], **settings: str) -> Prediction:
    """The prediction for a row of a table of runs."""
    row = {"model": model, "config": json.dumps(config), "input": json.dumps(size), "gpu": gpu, "num_gpus": "1"} | settings
    run, device = run_row(row, "run"), resolve_device(gpu)
    network = run.make_model()
    assert network is not None
    return load_predictor().predict(trace(run.workload(network), target=device), device)


def relative_interval(estimates: list[Estimate]) -> str:
    """The bounds of 90% intervals as factors on their medians, in the middle of ``estimates``."""
    low, high = (statistics.median(one.interval()[at] / one.median for one in estimates) for at in (0, 1))
    return f"{low:.2f} to {high:.2f}"


def half_precision() -> list[list[str]]:
    """How many settings of four transformers are known, and how wide the intervals of their memory are."""
    found = [
        predicted(gpu, model, config, size, batch_size="8", mode=mode, precision=precision, optimizer="adamw")
        for model, config, size in _NETWORKS.values()
        for gpu in _CARDS
        for mode, precision in _SETTINGS
    ]
    known = Counter(target for one in found for target in one.trained_quantities or ())
    in_words = f"time in {known['time']} of {len(found)} settings, memory in {known['memory']}"
    what = f"25: half precision of {', '.join(_NETWORKS)}, on {', '.join(_CARDS)}"
    width = relative_interval([one.peak_memory for one in found])
    return [
        [f"{what}: in `trained_quantities`", "nothing", in_words],
        ["25: interval of memory over its median", "0.72 to 1.40", width],
    ]


def lora(table: pd.DataFrame) -> list[list[str]]:
    """Step times of LoRA relative to full fine-tuning of Llama-3.2-3B: predicted, and measured by PEFT."""
    device, predictor = resolve_device(GPU), load_predictor()

    def predicted_s(adapter: Mapping[str, Any]) -> float:
        build = ObjectiveBuild(lambda trial: trained(trial, adapter, "AdamW"), device, [StudyDirection.MINIMIZE])
        try:
            return predictor.predict(build({"length": _LENGTH}).graph, device).step_time.median
        finally:
            build.close()

    newest = table[table["model"].str.contains("Llama") & table["config"].str.contains('"peft_version": "0.18')]
    full_ms, full_s = newest[newest["method"] == "full"]["step_ms"].median(), predicted_s({})
    lines = []
    for name, adapter in _ADAPTERS.items():
        is_own = newest["path"].str.contains(rf"/lora--llama-3.2-3B-rank{adapter['r']}(?:-target-mlp)?\.json")
        measured = newest[is_own]["step_ms"]
        found = f"{predicted_s(adapter) / full_s:.2f} (measured {measured.median() / full_ms:.2f})"
        lines.append([f"26: step time of {name} over that of full fine-tuning", "0.65 (measured 0.37)", found])
    return lines


def large_step() -> list[str]:
    """Memory of a training step of a language model with 3.4 billion parameters, without the context."""
    device = resolve_device("h100-sxm-80gb")
    settings = {"batch_size": "4", "mode": "train", "precision": "fp32", "optimizer": "adamw"}
    config = SIZES["xl"] | {"vocab_size": 10000, "context_length": 128}
    found = predicted(device.id, "cs336:BasicsTransformerLM", config, {"seq_len": 128}, **settings)
    reserved = (found.peak_memory.median - device.context_bytes) / MIB
    return ["27: memory of a training step of 3.4 billion parameters (71,180 MiB reserved)", "58,700 MiB", f"{reserved:,.0f} MiB"]


def main() -> None:
    """Show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("table", type=Path)
    arguments = parser.parse_args()
    h20 = ["26: the H20 in the catalog", "no", "yes" if any(gpu.startswith("h20-") for gpu in catalog()) else "no"]
    lines = [*half_precision(), h20, *lora(pd.read_csv(arguments.table)), large_step()]
    show("strangers", ["finding", "before", "after"], lines, record=arguments.record)


if __name__ == "__main__":
    main()
