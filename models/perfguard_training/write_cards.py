r"""Write a model card for each set of weights that `perfguard train` made, from what it noted beside them.

python -m perfguard_training.write_cards
"""

from __future__ import annotations

import importlib
import json
import textwrap
from importlib.resources import files
from pathlib import Path
from typing import Any

from perfguard_training.registry import learner_class

_PACKAGES = ("perfguard_models", "perfguard_papers")
_WIDTH = 130
_SOURCES = {
    "gpumemnet": "GPUMemNet (itu-rad/GPUMemNet, CC-BY-4.0)",
    "gpumemnet-mlp": "GPUMemNet's perceptrons (itu-rad/GPUMemNet, CC-BY-4.0)",
    "timm-benchmark": "timm's benchmark results (huggingface/pytorch-image-models, Apache-2.0)",
    "operators": "NeuSight's operators (sitar-lab/NeuSight, MIT)",
    "neusight-e2e": "NeuSight's transformers (sitar-lab/NeuSight, MIT)",
}
_FITS = {
    "failed": "failed", "caught": "caught", "caught_at_risk": "at risk", "fitting": "fitting", "pruned": "pruned",
    "pruned_at_risk": "at risk", "pairs": "pairs", "balanced": "balanced accuracy",
}  # fmt: skip
_LIMITS = """
Memory of GPUs other than the A100 was never read: of the RTX 3090 and 4090 it is only known which batches fitted. All of it ran
with cuDNN's benchmark mode on. Times are of half precision (RTX 3090 and 4090), or of float32 forward alone (single operators,
transformers); nothing was measured of float32 training of convolutional networks, of multi-GPU steps, or of recurrent networks.
Do not use it to compare GPUs that are not in the list, nor for billing.
"""


def card_of(name: str, card: dict[str, Any], num_bytes: int) -> str:
    """The text."""
    learner = next(base for base in learner_class(card["predictor"]).__mro__ if "name" in vars(base))  # not the part that fits it
    about = (importlib.import_module(learner.__module__).__doc__ or "").strip()
    lines = [f"# {name}", "", about, "", "## Data", ""]
    for what, number in card["rows"].items():
        table, *source, gpu, mode = what.split(" ")
        lines.append(
            f"- {number:,} runs on {gpu}, {mode} ({table}): {_SOURCES.get(' '.join(source), ' '.join(source) or 'ours')}"
        )
    lines += ["", *textwrap.wrap(card["left_out"], _WIDTH), "", "## Errors on what was held out", ""]
    lines += [
        "By family: a predictor that has seen no run of the family. By GPU: one that has seen no run on the GPU. Mean ± spread"
    ]
    lines += ["over the folds, median and 90th percentile of |predicted / measured - 1| (of utilisation: the difference);"]
    lines += ["coverage and median width of 90% intervals by a calibration on the other folds.", ""]
    lines += ["| split | runs | quantity | rows | mean | median | 90th | coverage | width |", "| --- " * 9 + "|"]
    for line in card["errors"]:
        values = f"{line['mean']:.1%} ± {line['spread']:.1%} | {line['median']:.1%} | {line['p90']:.1%}"
        interval = "- | -" if line["coverage"] is None else f"{line['coverage']:.1%} | {line['width']:.0%}"
        lines.append(f"| {line['split']} | {line['group']} | {line['quantity']} | {line['rows']:,} | {values} | {interval} |")
    if card["fits"]:
        lines += ["", "What fits, by the predicted median against the card's memory, and at the guard's default risk:", ""]
        lines += [f"| split | runs | {' | '.join(_FITS.values())} |", "| --- " * (2 + len(_FITS)) + "|"]
        for fit in card["fits"]:
            cells = [_cell(fit[key]) for key in _FITS]
            lines.append(f"| {fit['split']} | {fit['group']} | {' | '.join(cells)} |")
    lines += ["", "## What it must not be used for", "", _LIMITS.strip(), "", "## How it was made", ""]
    lines += [f"    {card['command']}", "", f"{card['made']} (without folds that were in the cache); {num_bytes / 1e6:.1f} MB."]
    return "\n".join(lines) + "\n"


def _cell(value: float | int | None) -> str:
    """A number of runs, a share, or nothing."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.1%}"


def main() -> None:
    """Write cards/NAME.md for each weights/NAME.json."""
    folders = [Path(str(files(package))) for package in _PACKAGES]
    for path in sorted(path for folder in folders for path in (folder / "weights").glob("*.json")):
        card = json.loads(path.read_text(encoding="utf-8"))
        if "predictor" in card:  # fusion and kernels are parts of predictors; their cards are written by hand
            size = path.with_suffix(".safetensors").stat().st_size
            (path.parents[1] / "cards" / f"{path.stem}.md").write_text(card_of(path.stem, card, size), encoding="utf-8")


if __name__ == "__main__":
    main()
