"""Parameter-efficient and quantized fine-tuning in dry runs: what has a gradient, a state, and how many bytes it takes.

bitsandbytes is for Linux alone. Where it, datasets or TRL is missing, their tests are skipped.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfguard.capture.trial import capture
from perfguard.devices import resolve_device
from perfguard.exceptions import CaptureError, TraceError
from perfguard.graph import StorageKind, trace
from perfguard.unmodelled import GENERATED, PAGED_STATES, TRITON
from perfguard.workload import CapturedTrial, Workload
from tests.perfguard.capture import toy_liger
from tests.perfguard.capture.toy_allocated import begins, peak_of_last_step
from tests.perfguard.capture.toy_ranks import bytes_of, in_a_child

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
A100 = resolve_device("a100")
HIDDEN, MIDDLE, VOCABULARY, LAYERS = 128, 256, 512, 2
LAYER = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2 + 3 * HIDDEN * MIDDLE
"""Weights of a layer: queries and outputs, keys and values of half as many heads, and three matrices of the MLP."""
NORMS, TABLES = (2 * LAYERS + 1) * HIDDEN, 2 * VOCABULARY * HIDDEN
ADAPTERS = LAYERS * 8 * (2 * HIDDEN + HIDDEN + HIDDEN // 2)
"""Of rank 8, at queries and values."""

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="its objectives really train where there is a GPU"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # as in the process of a dry run
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    if bnb := sys.modules.get("bitsandbytes"):
        bnb.functional.name2qmap.clear()  # its tables are on meta now, in this process, too
        bnb.optim.GlobalOptimManager.get_instance().initialize()  # the Trainer tells it about layers, by the ids of their weights


def llama(dtype: torch.dtype = torch.float32) -> Any:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": HIDDEN, "intermediate_size": MIDDLE, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).to(dtype)


def with_adapters(model: Any, **options: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options))


def fit(model: Any, optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW, device: Any = "cuda") -> None:
    model.to(device).train()
    made = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    for (tokens,) in DataLoader(TensorDataset(torch.randint(0, VOCABULARY, (64, 32))), 4):
        tokens = tokens.to(device)  # noqa: PLW2901
        model(input_ids=tokens, labels=tokens).loss.backward()
        made.step()
        made.zero_grad()


def assert_adapters_train(found: CapturedTrial, *, num_weights: int = ADAPTERS) -> None:
    assert bytes_of(found, StorageKind.GRADIENT) == 4 * num_weights
    assert 2 * 4 * num_weights <= bytes_of(found, StorageKind.OPTIMIZER_STATE) < 2 * 4 * num_weights + 100  # and step counters


# --- LoRA -----------------------------------------------------------------------------------------------------------------------


@functools.cache
def with_lora() -> CapturedTrial:
    return capture(lambda: fit(with_adapters(llama())), A100)


@pytest.mark.parametrize("device", ["cuda", 0, "torch.device(0)"])
def test_lora_trains_its_adapters_only_on_any_name_of_the_gpu(device: Any) -> None:
    def objective() -> None:
        fit(with_adapters(llama()), device=torch.device(0) if device == "torch.device(0)" else device)

    found = with_lora() if device == "cuda" else capture(objective, A100)
    assert_adapters_train(found)
    assert bytes_of(found, StorageKind.PARAMETER) == 4 * (LAYERS * LAYER + NORMS + TABLES + ADAPTERS)


def test_dora_has_a_magnitude_for_each_output() -> None:
    found = capture(lambda: fit(with_adapters(llama(), use_dora=True)), A100)
    assert_adapters_train(found, num_weights=ADAPTERS + LAYERS * (HIDDEN + HIDDEN // 2))


@pytest.mark.parametrize("reentrant", [True, False])
def test_lora_with_checkpointing_keeps_the_inputs_of_layers(reentrant: bool) -> None:
    def objective() -> None:
        model = llama()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        fit(with_adapters(model))

    found, whole = capture(objective, A100), with_lora()
    assert_adapters_train(found)
    assert bytes_of(found, StorageKind.ACTIVATION) < 0.3 * bytes_of(whole, StorageKind.ACTIVATION)
    assert found.graph.peak_live_bytes < whole.graph.peak_live_bytes


def test_precision_is_that_of_the_arithmetic() -> None:
    # Adapters in float32 beside a model in bfloat16.
    assert capture(lambda: fit(with_adapters(llama(torch.bfloat16))), A100).graph.precision == "bf16"
    assert with_lora().graph.precision == "fp32"


# --- Liger ----------------------------------------------------------------------------------------------------------------------


def test_peak_with_ligers_kernels_is_that_of_real_tensors() -> None:
    pytest.importorskip("liger_kernel")
    graph = in_a_child(toy_liger.train, "cpu").graph  # here, the log of a test would keep tensors alive
    assert graph.peak_live_bytes == pytest.approx(toy_liger.real_bytes(), rel=0.001)
    assert graph.unmodelled == (TRITON,)
    kernels = [op for op in graph.ops if op.name == "triton_kernel" and op.module.endswith("layers.0.mlp")]
    values = 4 * 4 * toy_liger.TOKENS * 128  # bytes of what the perceptron is wide
    assert [op.bytes_read for op in kernels] == [2 * values, 3 * values]
    assert [op.bytes_written for op in kernels] == [values, 2 * values]  # its backward pass writes to what it has read


# --- Optimizers of bitsandbytes and torchao -------------------------------------------------------------------------------------

WEIGHTS, BIAS = 2 * 1024 * 1024, 1024
CONSTANTS = 4 * WEIGHTS // 256
"""One float for each block of 256."""
STATES = {  # of AdamW; fewer than 4,096 values have states of 32 bits, and matrices of 100,000 and more are paged
    "AdamW8bit": 2 * (WEIGHTS + CONSTANTS + 4 * BIAS),
    "AdamW32bit": 2 * 4 * (WEIGHTS + BIAS),
    "PagedAdamW8bit": 2 * (2 + CONSTANTS + 4 * BIAS),
    "PagedAdamW32bit": 2 * 4 * (2 + BIAS),
    "Lion8bit": WEIGHTS + CONSTANTS + 4 * BIAS,
}


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024, bias=False))


@functools.cache
def with_two_layers(make: Callable[[Any], torch.optim.Optimizer]) -> CapturedTrial:
    def objective() -> None:
        model = two_layers().cuda()
        optimizer = make(model.parameters())
        for (x,) in DataLoader(TensorDataset(torch.randn(64, 1024)), 8):
            model(x.cuda()).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return capture(objective, A100)


@pytest.mark.parametrize("name", STATES)
def test_states_have_their_bits(name: str) -> None:
    found = with_two_layers(getattr(pytest.importorskip("bitsandbytes").optim, name))
    assert bytes_of(found, StorageKind.OPTIMIZER_STATE) == STATES[name]
    assert (PAGED_STATES in found.graph.unmodelled) == name.startswith("Paged")


@pytest.mark.parametrize(("name", "bits", "table"), [("AdamW8bit", 8, 256), ("AdamW4bit", 4, 16), ("AdamWFp8", 8, 0)])
def test_states_of_torchao_have_their_bits(name: str, bits: int, table: int) -> None:
    found = with_two_layers(getattr(pytest.importorskip("torchao.optim"), name))
    constants = CONSTANTS * (2 if bits == 4 else 1)  # its blocks have 128 values
    assert bytes_of(found, StorageKind.OPTIMIZER_STATE) == 2 * (WEIGHTS * bits // 8 + constants + 2 * 4 * table + 4 * BIAS)
    whole = with_two_layers(torch.optim.AdamW).graph.peak_live_bytes - 2 * 4 * (WEIGHTS + BIAS)
    # Its compiled step has no temporaries.
    assert found.graph.peak_live_bytes - bytes_of(found, StorageKind.OPTIMIZER_STATE) <= whole


@pytest.mark.parametrize("is_live", [True, False])
def test_states_of_a_workload_have_their_bits(is_live: bool) -> None:
    bnb, model = pytest.importorskip("bitsandbytes"), two_layers()
    optimizer = bnb.optim.AdamW(model.parameters(), optim_bits=8) if is_live else bnb.optim.AdamW8bit
    graph = trace(Workload(model, inputs=(8, 1024), loss=lambda out: out.mean(), optimizer=optimizer), target=A100)
    states = sum(storage.num_bytes for storage in graph.storages if storage.kind is StorageKind.OPTIMIZER_STATE)
    assert states == STATES["AdamW8bit"] + 2 * 256 * 4  # and the two tables of its 256 values


# --- Quantized layers -----------------------------------------------------------------------------------------------------------


def quantized(folder: Path, **options: Any) -> Any:
    config = transformers.BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.bfloat16, **options)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": 0})
    return with_adapters(peft.prepare_model_for_kbit_training(model))


NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize(
    ("options", "weights", "constants"),
    [
        (NF4, LAYERS * LAYER // 2, 4 * LAYERS * LAYER // 64),  # half a byte each, and a float for each block of 64
        ({"load_in_8bit": True}, LAYERS * LAYER, 4 * LAYERS * (4 * HIDDEN + 2 * MIDDLE)),  # a byte, and a float for each row
    ],
    ids=["nf4", "int8"],
)
def test_quantized_weights_are_counted_with_their_constants(
    options: dict[str, Any], weights: int, constants: int, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    llama(torch.bfloat16).save_pretrained(tmp_path)
    found = capture(lambda: fit(quantized(tmp_path, **options)), A100)
    assert bytes_of(found, StorageKind.PARAMETER) == weights + 4 * (NORMS + TABLES + ADAPTERS)  # peft casts the others to float32
    assert 0 <= bytes_of(found, StorageKind.BUFFER) - constants < 2000  # and rotary frequencies, and tables of 16 values
    assert_adapters_train(found)


def test_nf4_weight_is_multiplied_dequantized(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    llama(torch.bfloat16).save_pretrained(tmp_path)
    found = capture(lambda: fit(quantized(tmp_path, **NF4, bnb_4bit_use_double_quant=True)), A100)
    assert found.graph.precision == "bf16"
    ups = [op for op in found.graph.ops if op.module.endswith("layers.0.mlp.up_proj") and op.phase.name == "FORWARD"]
    assert [op.name for op in ups if op.name in ("dequantize_blockwise", "dequantize_4bit", "mm")] == [
        "dequantize_blockwise", "dequantize_4bit", "mm",
    ]  # fmt: skip
    assert next(op.flops for op in ups if op.name == "mm") == 2 * 4 * 32 * HIDDEN * MIDDLE


def test_model_quantized_before_the_trial_is_refused_by_name() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model = nn.Sequential(bnb.nn.LinearNF4(64, 64)).to("cpu")
    with pytest.raises(CaptureError, match=r"A model that was quantized before the trial .* Load it in the objective"):
        capture(lambda: model.to("cuda"), A100)


def test_workload_has_the_constants_of_quantized_weights_and_refuses_others_by_name() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    describe = functools.partial(Workload, inputs=(8, 256), loss=lambda output: output.mean())
    model = nn.Sequential(bnb.nn.LinearNF4(256, 128, compress_statistics=False), nn.Linear(128, 1))
    with pytest.raises(TraceError, match=r"The layer '0', a LinearNF4 of bitsandbytes, cannot be traced"):
        trace(describe(model), target=A100)
    graph = trace(describe(model.to("cpu")), target=A100)
    constants = sum(storage.num_bytes for storage in graph.storages if storage.kind is StorageKind.BUFFER)
    assert constants == 4 * (256 * 128 // 64 + 16)


# --- Transformers' Trainer ------------------------------------------------------------------------------------------------------


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.zeros(32, dtype=torch.int64), "labels": torch.zeros(32, dtype=torch.int64)}


def quiet(folder: Path) -> dict[str, Any]:
    return {"output_dir": str(folder), "report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": False}


def by_trainer(folder: Path, *, trainer: Any = transformers.Trainer, metrics: Any = None, **options: Any) -> CapturedTrial:
    def objective() -> None:
        arguments = transformers.TrainingArguments(per_device_train_batch_size=4, num_train_epochs=1, **quiet(folder), **options)
        data = Tokens()
        trainer(model=llama(), args=arguments, train_dataset=data, eval_dataset=data, compute_metrics=metrics).train()

    return capture(objective, A100, spares=False)


class WithItsOwnLoss(transformers.Trainer):  # type: ignore[misc, name-defined]
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(input_ids=inputs["input_ids"]).logits.erfinv().mean()


def test_loss_is_the_one_that_the_trainer_computes(tmp_path: Path) -> None:
    names = [op.name for op in by_trainer(tmp_path, trainer=WithItsOwnLoss).graph.ops]
    assert "erfinv" in names
    assert not any("nll_loss" in name for name in names)


LOGITS = 4 * 256 * 32 * VOCABULARY
"""Bytes of an evaluation's batch of 256."""


@pytest.mark.parametrize(
    ("options", "num_kept"),
    [
        ({"eval_strategy": "steps", "eval_steps": 500}, 0),
        ({"eval_strategy": "epoch", "metrics": lambda _: {}}, 16),
        ({"eval_strategy": "epoch", "metrics": lambda _: {}, "eval_accumulation_steps": 1}, 0),
    ],
    ids=["loss", "metrics", "metrics on the host"],
)
def test_evaluation_is_counted_with_the_logits_that_the_trainer_collects(
    options: dict[str, Any], num_kept: int, tmp_path: Path
) -> None:
    """A batch of 256 beside a training batch of 4 once changed nothing."""
    found = by_trainer(tmp_path, per_device_eval_batch_size=256, **options)
    peak = found.phases["the evaluation"].peak_live_bytes
    assert peak > found.graph.peak_live_bytes
    # Each batch is joined to those before, so both are there for a moment.
    assert 2 * num_kept * LOGITS <= peak < 2 * (num_kept + 2) * LOGITS


def test_optimizer_is_the_one_that_the_trainer_makes(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    wide = bytes_of(by_trainer(tmp_path), StorageKind.OPTIMIZER_STATE)
    narrow = bytes_of(by_trainer(tmp_path, optim="adamw_8bit"), StorageKind.OPTIMIZER_STATE)
    matrices, embedding = LAYERS * LAYER + TABLES // 2, TABLES // 2  # the Trainer keeps embeddings in 32 bits
    assert wide - narrow == pytest.approx(2 * 3 * matrices, rel=0.03)
    assert narrow > 2 * (matrices + 4 * embedding)


# --- TRL ------------------------------------------------------------------------------------------------------------------------


def words() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    known = {"<pad>": 0, "<eos>": 1, **{f"w{number}": 2 + number for number in range(400)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


class Begins(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        begins()


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_model_trains_on_the_longest_completions(name: str, tmp_path: Path) -> None:
    trl, datasets = (pytest.importorskip(name) for name in ("trl", "datasets"))
    prompts = datasets.Dataset.from_dict({"prompt": [" ".join(f"w{number}" for number in range(16))] * 64})

    def train(**options: Any) -> None:
        arguments = getattr(trl, f"{name}Config")(
            beta=0.0, per_device_train_batch_size=8, num_generations=4, max_completion_length=64, bf16=False, num_train_epochs=1,
            **quiet(tmp_path) | {"use_cpu": True}, **options,
        )  # fmt: skip
        getattr(trl, f"{name}Trainer")(
            llama(), lambda completions, **_: [float(len(text)) for text in completions], arguments, prompts,
            processing_class=words(), callbacks=[Begins()],
        ).train()  # fmt: skip

    found = in_a_child(train, "cpu")
    assert found.steps == 64 * 4 // 8
    assert found.graph.unmodelled == (GENERATED,)
    really = peak_of_last_step(lambda: train(max_steps=4, generation_kwargs={"min_new_tokens": 64}))
    assert found.graph.peak_live_bytes == pytest.approx(really, rel=0.01)


@pytest.mark.parametrize("packing", [True, False])
def test_sft_trainer_keeps_a_tile_of_logits(packing: bool, tmp_path: Path) -> None:
    # The tile is as wide as 32,768 words whatever the vocabulary. Triton's kernels make no copies of it.
    trl, datasets = (pytest.importorskip(name) for name in ("trl", "datasets"))
    texts = datasets.Dataset.from_dict({"text": [" ".join(f"w{number}" for number in range(32))] * 64})

    def objective() -> None:
        evaluates: dict[str, Any] = {"eval_strategy": "epoch", "per_device_eval_batch_size": 64}
        options = trl.SFTConfig(
            per_device_train_batch_size=4, max_length=32, num_train_epochs=1, packing=packing, **quiet(tmp_path), **evaluates
        )
        adapters = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        trl.SFTTrainer(
            model=llama(), args=options, train_dataset=texts, eval_dataset=texts, processing_class=words(), peft_config=adapters
        ).train()

    found = capture(objective, A100)
    assert found.graph.precision == "amp-bf16"
    assert_adapters_train(found)
    tiles = [storage for storage in found.graph.storages if storage.num_bytes >= 2 * 100 * 32_768]
    assert len(tiles) == 2  # of the forward and of the backward pass
    assert found.phases["the evaluation"].peak_live_bytes > 2 * 64 * 32 * 402  # whole logits, in half precision


def test_offloaded_activations_are_not_on_the_device(tmp_path: Path) -> None:
    trl, datasets = (pytest.importorskip(name) for name in ("trl", "datasets"))
    texts = datasets.Dataset.from_dict({"text": [" ".join(f"w{number}" for number in range(64))] * 64})

    def activations(offloads: bool) -> int:
        def objective() -> None:
            options = trl.SFTConfig(max_length=64, num_train_epochs=1, activation_offloading=offloads, **quiet(tmp_path))
            trl.SFTTrainer(llama(), options, train_dataset=texts, processing_class=words()).train()

        return capture(objective, A100).graph.bytes_by_kind()[StorageKind.ACTIVATION]

    assert activations(True) < 0.5 * activations(False)
