"""A small Llama with Liger's kernels, with real tensors on the CPU.

It prints the peak of a step in bytes:

    python -m tests.perfguard.capture.toy_liger

The kernels, which allocate nothing, are not run: Triton's interpreter (3.9) knows no floats as arguments.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from tests.perfguard.capture.toy_allocated import begins, peak_of_last_step
from tests.warm import run_fresh

VOCABULARY, TOKENS = 1024, 64


def train(before: Callable[[], object] = lambda: None) -> None:
    """Train on the CPU for some steps; ``before()`` is called before each."""
    import transformers

    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=VOCABULARY, use_cache=False)
    config._attn_implementation = "eager"
    model: Any = transformers.LlamaForCausalLM(config)
    importlib.import_module("liger_kernel.transformers").apply_liger_kernel_to_llama(model=model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.randint(0, VOCABULARY, (4, TOKENS))
    for _ in range(4):
        before()
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()


def real_bytes() -> int:
    """Peak of a step, in a process of its own."""
    return int(run_fresh("-m", __spec__.name, timeout_s=300).split()[-1])


def main() -> None:
    """Train, and print the peak of the last step."""
    importlib.import_module("triton.runtime.jit").JITFunction.run = lambda *_, **__: None
    print(peak_of_last_step(lambda: train(begins)))


if __name__ == "__main__":
    main()
