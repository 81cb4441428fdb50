"""Reserved memory of fine-tuning Llama-3.2-3B by thirty methods of PEFT: predicted, read on an L40S, and by what people use.

    pip install fitcheck-llm fitscout     # else their columns are empty
    python benchmarks/fine_tuning.py peft.csv.gz

The readings are the 99th percentile of PEFT's own method comparison. Each step is a dry run of its loop: the model in bfloat16,
four samples, AdamW or the method's own optimizer. The table does not say how long the samples of the largest batch are, only that
none has more than 768 tokens. So this length is one unknown number for all methods of a script. Each method is predicted with the
median of the lengths that would explain the other methods, and so are the formulas. PEFT changed its script in version 0.18.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import pandas as pd
import peft
import torch
import transformers
from _record import parser_of, show
from accelerate.commands.estimate import estimate_training_usage  # type: ignore[import-untyped]
from optuna.study import StudyDirection
from peft.optimizers import create_lorafa_optimizer

from perfguard import load_predictor, resolve_device
from perfguard.exceptions import PerfGuardError
from perfguard.predictor import Estimate
from perfguard_optuna.capture import ObjectiveBuild
from perfguard_research.evaluate import memory_of_kind

GIB = 2**30
BATCH = 4
LENGTHS = (480, 640)
"""Tokens of a sample for which steps are captured. Bytes for others follow a line."""
GPU = "l40s"
CONFIG = transformers.LlamaConfig(
    vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, max_position_embeddings=131072,
)  # fmt: skip
"""meta-llama/Llama-3.2-3B, config.json."""
PARAMETERS = 3_212_749_824


def trained(trial: optuna.Trial, adapter: Mapping[str, Any], optimizer_name: str) -> float:
    """Three steps of PEFT's loop (peft: method_comparison/MetaMathQA/run.py)."""
    model: Any = transformers.LlamaForCausalLM(CONFIG)
    model.to(torch.bfloat16)
    if adapter:
        kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(adapter["peft_type"])]
        known = {field.name for field in dataclasses.fields(kind)} - {"megatron_config", "megatron_core", "runtime_config"}
        settings = {name: value for name, value in adapter.items() if name in known and name != "peft_type"}
        model = peft.get_peft_model(model, kind(**settings | {"task_type": "CAUSAL_LM"}))
    model.cuda().train()
    if optimizer_name == "lora-fa":
        optimizer = create_lorafa_optimizer(model, r=32, lora_alpha=64, lr=1e-4)
    else:
        optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad])
    for _step in range(3):
        tokens = torch.ones(BATCH, trial.suggest_int("length", 1, 1024), dtype=torch.int64).cuda()
        output = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens)  # it lives until the next one
        loss = output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss)


class Row(NamedTuple):
    """A run of the table, and what is predicted for each of LENGTHS."""

    label: str
    script: str
    method: str
    rank: int
    on: frozenset[str]
    measured: float
    medians: list[float]
    log_sigma: float

    def at(self, length: float) -> float:
        """Bytes for a length of the samples."""
        (x, other), (y, z) = LENGTHS, self.medians
        return y + (length - x) * (z - y) / (other - x)

    @property
    def length(self) -> float:
        """The length that would explain the reading."""
        (x, other), (y, z) = LENGTHS, self.medians
        return x + (self.measured - y) * (other - x) / (z - y)


def rows_of(table: pd.DataFrame) -> tuple[list[Row], dict[str, str]]:
    """The rows that can be dry-run, and why others cannot."""
    device, predictor = resolve_device(GPU), load_predictor()
    rows, failed, done = [], {}, set()
    for run in table[table["model"].str.contains("Llama")].itertuples():
        config = json.loads(run.config)
        adapter = config["peft"] or {}
        script = "0.18 and newer" if tuple(map(int, config["peft_version"].split(".")[:2])) >= (0, 18) else "before 0.18"
        name = Path(run.path).stem.partition("--")[0] + " " + Path(run.path).stem.partition("3B-")[2]
        if (script, name) in done:  # the same run with another PyTorch
            continue
        done.add((script, name))
        build = ObjectiveBuild(lambda trial: trained(trial, adapter, run.optimizer), device, [StudyDirection.MINIMIZE])  # noqa: B023
        try:
            graphs = [build({"length": length}).graph for length in LENGTHS]
        except PerfGuardError as error:
            failed[name] = str(error)
            continue
        finally:
            build.close()
        found = [memory_of_kind("reserved", predictor.predict(graph, device), graph, device) for graph in graphs]
        targets = adapter.get("target_modules") or ()
        measured = json.loads(run.note)["reserved_99th"]
        label = label_of(run, adapter)
        medians = [estimate.median for estimate in found]
        on = frozenset([targets] if isinstance(targets, str) else targets)
        rows.append(Row(label, script, run.method, adapter.get("r") or 0, on, measured, medians, found[0].log_sigma))
        print(f"{script:15} {name:50} {measured / GIB:6.2f} GiB, length {rows[-1].length:.0f}", flush=True)
    return rows, failed


def label_of(run: Any, adapter: Mapping[str, Any]) -> str:
    """The line of the table that counts a run."""
    if run.method == "full":
        return "full"
    if run.method != "lora" or run.optimizer != "AdamW":
        return "other methods"
    if adapter.get("use_dora"):
        return "DoRA"
    return "LoRA" if len(adapter["target_modules"]) == 2 else "LoRA of the MLP"


def fitcheck(row: Row, length: int) -> float:
    """fitcheck-llm, with the dtypes of the run."""
    peer = importlib.import_module("fitcheck")
    model = peer.ModelConfig("Llama-3.2-3B", PARAMETERS, 3072, 28, 24, 8, 8192, 128256, 128, True)
    settings: dict[str, Any] = {"lora_rank": row.rank, "lora_targets": sorted(row.on)}
    if row.label == "full":
        settings = {"lora_rank": None, "optimizer_dtype": "bf16"}
    config = peer.TrainingConfig(batch_size=BATCH, seq_len=length, flash_attn=True, **settings)
    return float(peer.estimate(model, config, peer.get_gpu(GPU)).total_mib) * 2**20


def fitscout(row: Row, length: int) -> float:
    """fitscout."""
    estimator, profile = map(importlib.import_module, ("fitscout.memory.estimator", "fitscout.model.profile"))
    model = profile.ModelProfile(PARAMETERS, 28, 3072, 24, 8, 8192, 128256, True)
    method = "full" if row.label == "full" else "lora"
    found = estimator.estimate_memory(model, method=method, micro_batch=BATCH, seq_len=length, lora_rank=row.rank or 16)
    return float(found.total_gb) * GIB


def accelerate(row: Row, length: int) -> float:
    """The largest of what `accelerate estimate-memory` says for training. It knows no adapters and no batch."""
    return float(max(estimate_training_usage(4 * PARAMETERS, "bfloat16").values()))


def deepspeed(row: Row, length: int) -> float:
    """estimate_zero2_model_states_mem_needs of DeepSpeed 0.19 for one GPU without offload: model states alone."""
    return 20.0 * PARAMETERS


PEERS: dict[str, Callable[[Row, int], float]] = {
    "fitcheck-llm": fitcheck, "fitscout": fitscout, "accelerate": accelerate, "DeepSpeed": deepspeed,
}  # fmt: skip


def main() -> None:
    """Show the errors by method."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(40)  # errors alone
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    parser = parser_of(__doc__)
    parser.add_argument("table", type=Path)
    arguments = parser.parse_args()
    rows, failed = rows_of(pd.read_csv(arguments.table))
    errors: defaultdict[str, list[float]] = defaultdict(list)
    inside: defaultdict[str, list[bool]] = defaultdict(list)
    peers: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        length = statistics.median(other.length for other in rows if other.script == row.script and other.method != row.method)
        low, high = Estimate(row.at(length), row.log_sigma).interval()
        for label in (row.label, "all"):
            errors[label].append(row.at(length) / row.measured - 1)
            inside[label].append(low <= row.measured <= high)
        for name, formula in PEERS.items():
            if row.label != "other methods":
                try:
                    peers[row.label, name].append(abs(formula(row, round(length)) / row.measured - 1))
                except ImportError:
                    print(f"{name} is not installed")
    lines = []
    for label in ("full", "LoRA", "LoRA of the MLP", "DoRA", "other methods", "all"):
        own = errors[label]
        of_peers = [f"{statistics.fmean(peers[label, name]):.1%}" if peers[label, name] else "-" for name in PEERS]
        worst = max(own, key=abs)
        share = statistics.fmean(inside[label])
        lines.append([label, str(len(own)), f"{statistics.fmean(map(abs, own)):.1%}", f"{worst:+.1%}", f"{share:.0%}", *of_peers])
    show("fine-tuning", ["method", "runs", "mean error", "worst", "inside", *PEERS], lines, record=arguments.record)
    for name, why in failed.items():
        print(f"{name}: {why}")


if __name__ == "__main__":
    main()
