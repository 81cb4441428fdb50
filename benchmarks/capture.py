"""Dry runs of objectives as they stand: what each shows, how long it takes, and how much memory of the host.

    python benchmarks/capture.py                              # all
    python benchmarks/capture.py --only resnet50 llama_1.5b
    python benchmarks/capture.py --ray --only convolutional resnet50   # as tasks of Ray
    python benchmarks/capture.py --corpus                     # the ordinary programs of tests/corpus

Each objective is dry-run for an absent A100, in a process of its own. "cold" is the first dry run, with the start of its server;
"warm" is a second one of another structure; "known" is a third, equal to the second. "equal" compares the graph with that of an
explicit Workload. A dry run of Ray is a process of its own; the first one waits for Ray to start its processes, too.

Of a program of the corpus, "true MiB" is the peak of live bytes of a real run on the CPU (`tests/live_bytes.py`). "true steps"
are counted by hand.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
import torch
import torch.nn.functional as F
from _record import parser_of, show
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfguard import TensorSpec, Workload, resolve_device, trace
from perfguard.capture import Answer, DryRuns
from perfguard.exceptions import PerfGuardError
from perfguard_optuna.capture import ObjectiveBuild

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "objectives"
Objective = Callable[[optuna.Trial], Any]
Describe = Callable[[int], Workload]
"""The workload of a batch size."""
_TIMEOUT_S = 300
BATCHES = (16, 32)


def images(batch: int, size: int = 32, classes: int = 10) -> DataLoader[Any]:
    number = 4 * batch
    return DataLoader(TensorDataset(torch.randn(number, 3, size, size), torch.randint(0, classes, (number,))), batch)


def tokens(batch: int, length: int = 12) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randint(0, 100, (4 * batch, length)), torch.randint(0, 5, (4 * batch,))), batch)


def fit(model: nn.Module, loader: DataLoader[Any], optimizer: torch.optim.Optimizer, epochs: int = 3) -> float:
    for _epoch in range(epochs):
        for inputs, labels in loader:
            inputs, labels = inputs.cuda(), labels.cuda()  # noqa: PLW2901 - as users write it
            optimizer.zero_grad()
            output = model(inputs)
            loss = F.cross_entropy(output, labels)
            loss.backward()
            optimizer.step()
    return float(loss)


def convolutional() -> nn.Module:
    layers = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return nn.Sequential(*layers)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(100, 32), nn.LSTM(32, 64, 2, batch_first=True), nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.lstm(self.embedding(x))[0][:, -1])


def of_torchvision(name: str) -> nn.Module:
    import torchvision  # type: ignore[import-untyped]

    model: nn.Module = torchvision.models.get_model(name)
    return model


def of_timm(name: str) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(name)
    return model


def llama(**sizes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes))
    return model


def classifier(
    make: Callable[[], nn.Module], size: int, classes: int, optimizer: Any = torch.optim.AdamW
) -> tuple[Objective, Describe]:
    """An objective with images, and its workload."""

    def objective(trial: optuna.Trial) -> float:
        model = make().cuda()
        batch = trial.suggest_categorical("batch", BATCHES)
        return fit(model, images(batch, size, classes), optimizer(model.parameters()))

    def describe(batch: int) -> Workload:
        targets = TensorSpec((batch,), "int64")
        return Workload(make(), inputs=(batch, 3, size, size), targets=targets, loss=F.cross_entropy, optimizer=optimizer)

    return objective, describe


def recurrent(trial: optuna.Trial) -> float:
    model = Recurrent().cuda()
    return fit(model, tokens(trial.suggest_categorical("batch", BATCHES)), torch.optim.Adam(model.parameters()))


def recurrent_workload(batch: int) -> Workload:
    inputs, targets = TensorSpec((batch, 12), "int64"), TensorSpec((batch,), "int64")
    return Workload(Recurrent(), inputs=inputs, targets=targets, loss=F.cross_entropy, optimizer=torch.optim.Adam)


def autocast(trial: optuna.Trial) -> float:
    model = convolutional().cuda()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
    for inputs, labels in images(trial.suggest_categorical("batch", BATCHES)):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(inputs.cuda()), labels.cuda())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return float(loss)


def gan(trial: optuna.Trial) -> float:
    batch = trial.suggest_categorical("batch", BATCHES)
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 20)).cuda()
    critic = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    makes, judges = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
    for (real,) in DataLoader(TensorDataset(torch.randn(640, 20)), batch):
        made = generator(torch.randn(batch, 8, device="cuda"))
        judges.zero_grad()
        (critic(made.detach()).mean() - critic(real.cuda()).mean()).backward()
        judges.step()
        makes.zero_grad()
        (-critic(made).mean()).backward()
        makes.step()
    return 0.0


def learn_text(model: Any, optimizer: torch.optim.Optimizer, vocabulary: int, shape: tuple[int, int]) -> float:
    for _step in range(10):
        text = torch.randint(0, vocabulary, shape, device="cuda")
        model(input_ids=text, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return 0.0


def llama_large(trial: optuna.Trial) -> float:
    """1.5 billion parameters."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 8}
    model = llama(vocab_size=32000, intermediate_size=5632, **sizes).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    batch = trial.suggest_categorical("batch", (4, 8))
    return learn_text(model, optimizer, 32000, (batch, 1024))


def llama_8b(trial: optuna.Trial) -> float:
    """Eight billion parameters, LoRA, FSDP2 with a part for each layer: rank 0 of 8."""
    import torch.distributed as dist
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl", rank=0, world_size=8)
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    base: Any = llama(vocab_size=128256, intermediate_size=14336, **sizes).to(torch.bfloat16)
    model: Any = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear"), autocast_adapter_dtype=False)
    for part in (*base.model.layers, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-4)
    batch = trial.suggest_categorical("batch", (1, 2))
    return learn_text(model, optimizer, 128256, (batch, 2048))


def llama_trainer(trial: optuna.Trial, *, lora: bool) -> float:
    from transformers import Trainer, TrainingArguments

    model = llama(vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    text = [{"input_ids": row, "labels": row} for row in torch.randint(0, 500, (128, 64))]
    batch = trial.suggest_categorical("batch", BATCHES)
    switches = {"gradient_accumulation_steps": 2, "bf16": True, "gradient_checkpointing": not lora}
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    folder = tempfile.gettempdir()
    arguments = TrainingArguments(folder, per_device_train_batch_size=batch, num_train_epochs=2, **switches, **quiet)  # type: ignore[arg-type]
    Trainer(model=model, args=arguments, train_dataset=text).train()
    return 0.0


def accelerated(trial: optuna.Trial) -> float:
    from accelerate import Accelerator  # type: ignore[import-untyped]

    accelerator, model = Accelerator(mixed_precision="bf16"), convolutional()
    loader = images(trial.suggest_categorical("batch", BATCHES))
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    for inputs, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()
    return 0.0


def script(name: str) -> Objective:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.objective  # type: ignore[no-any-return]


_momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
EXPLICIT: dict[str, tuple[Objective, Describe]] = {
    "convolutional": classifier(convolutional, 32, 10),
    "compiled": classifier(lambda: torch.compile(convolutional()), 32, 10),  # type: ignore[arg-type,return-value]
    "resnet50": classifier(functools.partial(of_torchvision, "resnet50"), 224, 1000, _momentum),
    "densenet121": classifier(functools.partial(of_torchvision, "densenet121"), 224, 1000, _momentum),
    "mobilenet_v3_large": classifier(functools.partial(of_torchvision, "mobilenet_v3_large"), 224, 1000, _momentum),
    "vit_base_patch16_224": classifier(functools.partial(of_timm, "vit_base_patch16_224"), 224, 1000),
    "convnext_tiny": classifier(functools.partial(of_timm, "convnext_tiny"), 224, 1000),
    "lstm": (recurrent, recurrent_workload),
}
OTHERS: dict[str, Objective] = {
    "fp16_scaler_clipping": autocast,
    "gan": gan,
    "llama_1.5b": llama_large,
    "llama_8b_lora_fsdp": llama_8b,
    "llama_trainer": functools.partial(llama_trainer, lora=False),
    "llama_lora": functools.partial(llama_trainer, lora=True),
    "accelerate": accelerated,
}
NAMES = [*EXPLICIT, *OTHERS, *sorted(path.stem for path in SCRIPTS.glob("*.py"))]


def run_one(name: str) -> None:
    """In a process of its own: print one JSON line."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    objective = EXPLICIT[name][0] if name in EXPLICIT else OTHERS.get(name) or script(name)
    directions: Any = ("minimize", "maximize") if name.startswith("multi") else ("minimize",)
    study = optuna.create_study(directions=directions, sampler=optuna.samplers.RandomSampler(seed=0))
    batches = {"llama_1.5b": (4, 8), "llama_8b_lora_fsdp": (1, 2)}.get(name, BATCHES)
    build = ObjectiveBuild(objective, device := resolve_device("a100"), study.directions)
    seconds = []
    try:
        for batch in (batches[0], batches[1], batches[1]):
            trial = study.ask(fixed_distributions={}) if name not in NAMED else fixed(study, batch)
            start = time.perf_counter()
            found = build.ask(trial)
            seconds.append(time.perf_counter() - start)
        equal = "" if name not in EXPLICIT else is_equal(found.graph, EXPLICIT[name][1](batches[1]), device)
        graph, unseen = found.graph, found.unseen
        result = {"ops": len(graph.ops), "peak": graph.peak_live_bytes, "steps": found.steps, "unseen": unseen, "equal": equal}
    except PerfGuardError as error:
        result = {"error": str(error)}
    build.close()
    print(json.dumps(result | {"seconds": seconds, "own": peak_of_children()}))


NAMED = {*EXPLICIT, *OTHERS}
"""Objectives whose parameter is the batch size. Those of the scripts are drawn."""


def fixed(study: optuna.Study, batch: int) -> optuna.Trial:
    study.enqueue_trial({"batch": batch})
    return study.ask()


def is_equal(graph: Any, workload: Workload, device: Any) -> str:
    return "yes" if graph.content_hash == trace(workload, target=device).content_hash else "no"


def ray_rows(names: Sequence[str]) -> list[list[str]]:
    """Seconds of three dry runs of each objective, as a training function of Ray."""
    import ray

    from perfguard_ray.capture import TrainableBuild

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    rows = []
    for name in names:
        build, seconds = TrainableBuild(functools.partial(as_trainable, EXPLICIT[name][0]), resolve_device("a100")), []
        for batch in (*BATCHES, BATCHES[-1]):
            start = time.perf_counter()
            build({"batch": batch})
            seconds.append(f"{time.perf_counter() - start:.2f}")
        rows.append([name, *seconds])
    ray.shutdown()
    return rows


def as_trainable(objective: Objective, config: dict[str, Any]) -> None:
    objective(optuna.trial.FixedTrial(config))  # type: ignore[arg-type]


def corpus_rows() -> list[list[str]]:
    """What a dry run of each program of the corpus shows, beside the truth."""
    sys.path.insert(0, str(ROOT))
    from tests.corpus.programs import PROGRAMS
    from tests.live_bytes import peak_live_bytes

    rows: list[list[str]] = []
    for program, true_steps in PROGRAMS.items():
        print(*rows[-1:], file=sys.stderr, flush=True)  # a quarter of an hour in all
        runs = DryRuns(lambda ask, program=program: program(), resolve_device("a100"))  # type: ignore[misc]
        runs.start()
        start = time.perf_counter()
        try:
            found = runs.capture(lambda *question: Answer("", None))
        except PerfGuardError as error:
            rows.append([program.__name__, f"no: {str(error)[:60]}", *["-"] * 6])
            continue
        finally:
            runs.close()
        seconds = time.perf_counter() - start
        seen = max(graph.peak_live_bytes for graph in (found.graph, *found.phases.values()))
        true = peak_live_bytes(program)
        sizes = [f"{seen / 2**20:.3f}", f"{true / 2**20:.3f}", f"{seen / true - 1:+.1%}"]
        rows.append([program.__name__, "yes", *sizes, str(found.steps), str(true_steps), f"{seconds:.1f}"])
    return rows


def peak_of_children() -> int:
    """Largest resident set of the processes for dry runs, in bytes. It counts pages that they share with this one."""
    import resource

    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def main() -> None:
    """Dry-run every objective and show the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", default=NAMES, metavar="NAME", help="some of: " + ", ".join(NAMES))
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--ray", action="store_true", help="dry-run as Ray does; of the objectives that have a Workload")
    parser.add_argument("--corpus", action="store_true", help="dry-run the programs of tests/corpus, beside the truth")
    arguments = parser.parse_args()
    if arguments.corpus:
        columns = ["program", "came through", "seen, MiB", "true MiB", "differs", "steps", "true steps", "s"]
        show("corpus", columns, corpus_rows(), record=arguments.record)
        return
    if arguments.one:
        run_one(arguments.one)
        return
    if arguments.ray:
        columns = ["training function", "first, s", "another structure, s", "known, s"]
        show("ray-dry-runs", columns, ray_rows([name for name in arguments.only if name in EXPLICIT]), record=arguments.record)
        return
    rows = [[name, *cells(measure_one(name))] for name in arguments.only]
    columns = ["objective", "captured", "cold, s", "warm, s", "known, s", "host MiB", "operators", "peak MiB", "steps", "equal"]
    show("capture", columns, rows, record=arguments.record)


def measure_one(name: str) -> dict[str, Any]:
    """What the process of one objective printed."""
    command = [sys.executable, __file__, "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"more than {_TIMEOUT_S} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return {"error": (done.stderr.strip().splitlines() or [""])[-1]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def cells(found: dict[str, Any]) -> list[str]:
    """A row of the table."""
    if "error" in found:
        return [f"no: {found['error'][:60]}", *["-"] * 8]
    seconds = [f"{second:.2f}" if second >= 0.005 else "0.00" for second in found["seconds"]]
    captured = f"yes, but {found['unseen'][:40]}" if found["unseen"] else "yes"
    steps = "-" if found["steps"] is None else f"{found['steps']:,}"
    sizes = [f"{found['own'] / 2**20:,.0f}", f"{found['ops']:,}", f"{found['peak'] / 2**20:,.1f}"]
    return [captured, *seconds, *sizes, steps, found["equal"] or "-"]


if __name__ == "__main__":
    main()
