"""Ordinary objectives on a real GPU: what their dry runs predict, and what was measured.

    python benchmarks/on_gpu.py benchmarks/data/h100.csv --gpu h100 [--only resnet50 gpt2] [--record docs/results/data]
    python benchmarks/on_gpu.py out/mine.csv --measure     # on a machine with a GPU: write the table first

Nobody describes a step, and nothing is learnt: what is predicted is of a dry run, before any trial. Each objective is measured in
a process of its own. Needs torchvision, timm, transformers and peft.
"""

from __future__ import annotations

import csv
import functools
import multiprocessing
import random
import statistics
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import optuna
import torch
import torch.nn.functional as F
from _record import parser_of, show
from optuna.study import StudyDirection
from torch import nn

from perfguard import Estimate, Measurement, Observation, Predictor, Run, load_predictor, resolve_device
from perfguard.devices import Device
from perfguard.learning import assess
from perfguard.predictor import TARGETS, Target
from perfguard.quantities import format_bytes, format_seconds
from perfguard_optuna.capture import ObjectiveBuild
from perfguard_research.tables import MIB

_STEPS = 30
_COLUMNS = ("objective", "memory_mib", "reserved_mib", "step_ms", "framework")
_LEARNT, _ORDERS = (0, 1, 3, 5, 10), 20
Objective = Callable[[optuna.Trial], float]


def fit(
    model: nn.Module,
    batch: tuple[torch.Tensor, ...],
    loss_of: Callable[..., torch.Tensor],
    *,
    half: Any = None,
    adam: bool = True,
) -> float:
    """A plain loop: the batch comes from the host at every step."""
    model = model.cuda()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    if not adam:
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=half is torch.float16)
    for _ in range(_STEPS):
        tensors = [tensor.cuda() for tensor in batch]
        with torch.autocast("cuda", dtype=half) if half else nullcontext():
            loss = loss_of(model, *tensors)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item()


def classify(model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(inputs), labels)


def images(
    trial: optuna.Trial,
    *,
    name: str,
    batch: int,
    library: str = "torchvision",
    compiled: bool = False,
    last: bool = False,
    **how: Any,
) -> float:
    """A network for ImageNet."""
    import timm
    import torchvision  # type: ignore[import-untyped]

    model: Any = timm.create_model(name) if name.endswith("_224") else torchvision.models.get_model(name)
    data = torch.randn(batch, 3, 224, 224)
    if last:
        model, data = model.to(memory_format=torch.channels_last), data.to(memory_format=torch.channels_last)
    return fit(torch.compile(model) if compiled else model, (data, torch.randint(1000, (batch,))), classify, **how)  # type: ignore[arg-type]


def text(trial: optuna.Trial, *, config: str, cls: str, shape: tuple[int, int], lora: bool = False, **how: Any) -> float:
    """A language model of Transformers, from its configuration. ``half="all"``: its weights are bfloat16, too."""
    import transformers

    sizes = how.pop("sizes", {})
    configuration = getattr(transformers, config)(**sizes)
    model = getattr(transformers, cls)(configuration)
    if how.get("half") == "all":
        model, how = model.to(torch.bfloat16), {**how, "half": None}
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    tokens = torch.randint(configuration.vocab_size, shape)
    return fit(model, (tokens,), lambda model, ids: model(input_ids=ids, labels=ids).loss, **how)


def trainer(trial: optuna.Trial) -> float:
    """Hugging Face's Trainer with checkpointed activations and accumulation."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    data = [{"input_ids": row, "labels": row} for row in torch.randint(50_000, (16 * 2 * _STEPS, 512))]
    switches = {"gradient_accumulation_steps": 2, "bf16": True, "gradient_checkpointing": True, "num_train_epochs": 1}
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    arguments = TrainingArguments(tempfile.gettempdir(), per_device_train_batch_size=16, **switches, **quiet)  # type: ignore[arg-type]
    Trainer(model=GPT2LMHeadModel(GPT2Config()), args=arguments, train_dataset=data).train()
    return 0.0


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = (
            nn.Embedding(10_000, 512),
            nn.LSTM(512, 1024, 2, batch_first=True),
            nn.Linear(1024, 50),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.lstm(self.embedding(tokens))[0]).mT
        return out


def tagger(trial: optuna.Trial) -> float:
    return fit(Tagger(), (torch.randint(10_000, (128, 128)), torch.randint(50, (128, 128))), classify)


def unet_block(inputs: int, outputs: int) -> nn.Module:
    layers = ((nn.Conv2d(n, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)) for n in (inputs, outputs))
    return nn.Sequential(*(layer for group in layers for layer in group))


class UNet(nn.Module):
    """Four levels, from 64 channels."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 128, 256, 512)
        self.down = nn.ModuleList(unet_block(n, m) for n, m in zip((3, *widths), widths, strict=False))
        self.rise = nn.ModuleList(nn.ConvTranspose2d(2 * n, n, 2, stride=2) for n in widths[-2::-1])
        self.up = nn.ModuleList(unet_block(2 * n, n) for n in widths[-2::-1])
        self.head = nn.Conv2d(64, 21, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = []
        for block in self.down:
            x = block(x)
            skipped.append(x)
            x = F.max_pool2d(x, 2)
        x = skipped.pop()
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat([rise(x), skipped.pop()], 1))
        out: torch.Tensor = self.head(x)
        return out


def segment(trial: optuna.Trial) -> float:
    return fit(UNet(), (torch.randn(16, 3, 256, 256), torch.randint(21, (16, 256, 256))), classify, half=torch.float16)


def perceptron(trial: optuna.Trial) -> float:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.ReLU())), nn.Linear(512, 10))
    return fit(model, (torch.randn(256, 512), torch.randint(10, (256,))), classify)


_LLAMA = {"vocab_size": 32_000, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
          "num_key_value_heads": 8, "intermediate_size": 5632}  # fmt: skip
_llama = functools.partial(text, config="LlamaConfig", cls="LlamaForCausalLM", sizes=_LLAMA, shape=(4, 1024), half="all")
_bf16, _fp16 = torch.bfloat16, torch.float16
OBJECTIVES: dict[str, Objective] = {
    "perceptron": perceptron,
    "resnet50": functools.partial(images, name="resnet50", batch=64, adam=False),
    "resnet50, bf16, channels_last": functools.partial(images, name="resnet50", batch=128, adam=False, half=_bf16, last=True),
    "resnet18": functools.partial(images, name="resnet18", batch=16),
    "mobilenet_v3_large": functools.partial(images, name="mobilenet_v3_large", batch=128),
    "efficientnet_b0, fp16": functools.partial(images, name="efficientnet_b0", batch=96, half=_fp16),
    "densenet121": functools.partial(images, name="densenet121", batch=64, adam=False),
    "convnext_tiny": functools.partial(images, name="convnext_tiny", batch=64),
    "vit_base, fp16": functools.partial(images, name="vit_base_patch16_224", batch=64, half=_fp16),
    "swin_tiny, bf16": functools.partial(images, name="swin_t", batch=64, half=_bf16),
    "vit_small, compiled, bf16": functools.partial(images, name="vit_small_patch16_224", batch=64, half=_bf16, compiled=True),
    "unet, fp16": segment,
    "lstm": tagger,
    "bert": functools.partial(text, config="BertConfig", cls="BertForMaskedLM", shape=(32, 128)),
    "gpt2, bf16": functools.partial(text, config="GPT2Config", cls="GPT2LMHeadModel", shape=(16, 512), half=_bf16),
    "gpt2, Trainer, checkpointed": trainer,
    "t5": functools.partial(
        text,
        config="T5Config",
        cls="T5ForConditionalGeneration",
        shape=(32, 128),
        half=_bf16,
        sizes={"decoder_start_token_id": 0},
    ),
    "llama 1.5b, bf16": _llama,
    "llama 1.5b, LoRA, bf16": functools.partial(_llama, lora=True),
}


def measure(name: str, table: Path) -> None:
    """Run one objective in this process, and add its line to ``table``."""
    with suppress(Exception), Run(resolve_device("auto")) as run:
        OBJECTIVES[name](None)  # type: ignore[arg-type]
    measured = run.measurement or run.finish("failed")
    memory, reserved, step_s = measured.peak_memory_bytes, measured.reserved_peak_bytes, measured.step_time_s
    assert measured.status == "ok", measured.note
    assert memory is not None
    assert reserved is not None
    assert step_s is not None
    line = [name, f"{memory / MIB:.0f}", f"{reserved / MIB:.0f}", f"{1e3 * step_s:.4g}", measured.framework]
    with table.open("a", newline="") as file:
        csv.writer(file).writerow(line)
    print(*line, sep=" | ", flush=True)


def run_of(row: dict[str, str], device: Device) -> Observation:
    """The dry run of an objective, with what was measured."""
    build = ObjectiveBuild(OBJECTIVES[row["objective"]], device, [StudyDirection.MINIMIZE])
    try:
        graph = build({}).graph
    finally:
        build.close()
    memory, step_s = round(float(row["memory_mib"]) * MIB), float(row["step_ms"]) / 1e3
    return Observation(
        graph, device, Measurement("ok", device.id, device.name, memory, step_s, _STEPS * step_s, _STEPS, "nvml", "")
    )


def predicted(predictor: Predictor, run: Observation, widening: Mapping[Target, float]) -> tuple[Estimate, Estimate]:
    """Memory and step time, as TARGETS orders them."""
    prediction = predictor.predict(run.graph, run.device).widened(widening)
    return prediction.peak_memory, prediction.step_time


def judged(estimate: Estimate, value: float | None) -> tuple[list[str], float, bool]:
    """Predicted, measured and error in words; the error, and whether the interval holds the value."""
    assert value is not None
    low, high = estimate.interval()
    error, inside = estimate.median / value - 1, low <= value <= high
    words = format_bytes if value > 1e3 else format_seconds  # no step takes so long, and no process so little
    return [words(estimate.median), words(value), f"{error:+.1%}{'' if inside else ', outside'}"], abs(error), inside


def judgements(
    predictor: Predictor, run: Observation, widening: Mapping[Target, float] = MappingProxyType({})
) -> list[tuple[list[str], float, bool]]:
    """Both quantities of a run, judged."""
    return [*map(judged, predicted(predictor, run, widening), map(run.measured, TARGETS))]


def learn(predictor: Predictor, runs: Sequence[Observation]) -> Mapping[Target, float]:
    """Let the predictor learn as a guard does, whose log has each run with its prediction. Return how intervals are widened."""
    predictor.fine_tune([])
    known: list[Observation] = []
    now = assess(known)
    for run in runs:
        estimates = dict(zip(TARGETS, predicted(predictor, run, now.widening), strict=True))
        known.append(replace(run, predicted=estimates, widening=now.widening, predicted_by=predictor.name))
        now = assess(known)
        predictor.fine_tune(now.observations)
    return now.widening


def after(number: int, predictor: Predictor, runs: Sequence[Observation]) -> list[str]:
    """Mean errors of other runs after ``number`` have been learnt, and the share inside the intervals, of both quantities."""
    found = []
    for seed in range(_ORDERS):
        order = random.Random(seed).sample(runs, len(runs))
        widening = learn(predictor, order[:number])
        found += [judgements(predictor, run, widening) for run in order[number:]]
    columns = ([[one[at] for one in of] for at in (1, 2)] for of in zip(*found, strict=True))
    return [f"{statistics.fmean(errors):.1%}; {statistics.fmean(inside):.0%}" for errors, inside in columns]


def main() -> None:
    """Measure, or show a line for each objective that was."""
    parser = parser_of(__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--only", nargs="+", default=list(OBJECTIVES), metavar="NAME", help="some of: " + "; ".join(OBJECTIVES))
    parser.add_argument("--gpu", default="auto", help="on which the table was measured")
    parser.add_argument("--measure", action="store_true", help="write the table, on this machine's GPU")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if arguments.measure:
        import timm  # noqa: F401 - once, and not in every process
        import transformers  # noqa: F401

        if not arguments.table.exists():
            arguments.table.write_text(",".join(_COLUMNS) + "\r\n")
        for name in arguments.only:
            process = multiprocessing.get_context("fork").Process(target=measure, args=(name, arguments.table))
            process.start()
            process.join()
        return
    device, predictor = resolve_device(arguments.gpu), load_predictor()
    with arguments.table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["objective"] in arguments.only]
    runs = {row["objective"]: run_of(row, device) for row in rows}
    found = [judgements(predictor, run) for run in runs.values()]
    lines = [[name, *(cell for one in of for cell in one[0])] for name, of in zip(runs, found, strict=True)]
    for words, statistic in (("mean error", statistics.fmean), ("median error", statistics.median)):
        errors = (f"{statistic(one[1] for one in of):.1%}" for of in zip(*found, strict=True))
        lines.append([words, *(cell for error in errors for cell in ("", "", error))])
    inside_of = (f"{sum(one[2] for one in of)} of {len(of)}" for of in zip(*found, strict=True))
    lines.append(["inside the 90% interval", *(cell for number in inside_of for cell in ("", "", number))])
    columns = ["objective", "memory predicted", "measured", "error", "step predicted", "measured", "error"]
    show("on-gpu", columns, lines, record=arguments.record)
    lines = [[str(number), *after(number, predictor, [*runs.values()])] for number in _LEARNT if number < len(runs)]
    show("on-gpu-learning", ["runs learnt", "memory of the others", "step time"], lines, record=arguments.record)


if __name__ == "__main__":
    main()
