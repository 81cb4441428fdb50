r"""Write a model card for each set of weights that `perfguard train` made, from what it noted beside them.

python -m perfguard_training.write_cards
"""

from __future__ import annotations

import importlib
import json
import textwrap
from collections import defaultdict
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
    "neusight-e2e": "NeuSight's transformers (sitar-lab/NeuSight, MIT)",
    "": "ours",
}
"""Tables of runs name their sources by repository, OWNER/NAME."""
_FITS = {
    "failed": "failed", "caught": "caught", "caught_at_risk": "at risk", "fitting": "fitting", "pruned": "pruned",
    "pruned_at_risk": "at risk", "pairs": "pairs", "balanced": "balanced accuracy",
}  # fmt: skip
_OF_MEMORY = """
Memory of GPUs other than the A100 was never read: of the RTX 3090 and 4090 it is only known which batches fitted. All of it ran
with cuDNN's benchmark mode on."""
_OF_ALL = "Do not use it to compare GPUs that are not in the list, nor for billing."
_LIMITS = {
    "memory-forest": f"""{_OF_MEMORY} With that mode off, convolutional networks need less memory than this says.
Utilisation is of perceptrons on the A100 alone. Recurrent networks are not in the tables. {_OF_ALL}""",
    "two-clocks": f"""
Times are of one GPU. What GPUs send to each other, and waiting for data, are not in them. On most GPUs the networks are those of
torchvision at small batches; transformers in training were measured on few. A step of small operators takes as long as the host
needs to launch them, and hosts differ by more than GPUs of one kind do: on another machine such a step can be off by a factor of
two or more until some runs are measured there. Recurrent networks are not in the tables. {_OF_ALL}""",
}
"""What each kind of weights must not be used for. The papers' weights have the next one."""
_LIMITS_OF_PAPERS = f"""{_OF_MEMORY} Times are of half precision on the RTX 3090 and 4090. Nothing was measured of float32
training, of steps on several GPUs, or of recurrent networks. {_OF_ALL}"""
_HELD_OUT = """
By family: a predictor that has seen no run of the family. By source and by GPU: one that has seen no run of the source, or on the
GPU. Mean ± spread over the folds, median and 90th percentile of |predicted / measured - 1| (of utilisation: the difference);
coverage and median width of 90% intervals by a calibration on the other folds.
"""


def card_of(name: str, card: dict[str, Any], num_bytes: int) -> str:
    """The text."""
    learner = next(base for base in learner_class(card["predictor"]).__mro__ if "name" in vars(base))  # not the part that fits it
    about = (importlib.import_module(learner.__module__).__doc__ or "").strip()
    lines = [f"# {name}", "", about, "", "## Data", ""]
    lines += _data_lines(card["rows"])
    lines += ["", *_wrapped(card["left_out"]), "", "## Errors on what was held out", ""]
    lines += [*_wrapped(_HELD_OUT), ""]
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
    limits = _LIMITS.get(card["predictor"], _LIMITS_OF_PAPERS)
    lines += ["", "## What it must not be used for", "", *_wrapped(limits), "", "## How it was made", ""]
    lines += [f"    {card['command']}", "", f"{card['made']} (without folds that were in the cache); {num_bytes / 1e6:.1f} MB."]
    return "\n".join(lines) + "\n"


def _data_lines(rows: dict[str, int]) -> list[str]:
    """A line for each source, kind of table and mode, with the number of runs on each GPU."""
    found: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for what, number in rows.items():
        table, *source, gpu, mode = what.split(" ")
        name = " ".join(source)
        found[_SOURCES.get(name, name), table, mode].append(f"{number:,} on {gpu}")
    return [
        line
        for (source, table, mode), numbers in found.items()
        for line in _wrapped(f"- {source}; {table}, {mode}: {', '.join(numbers)}", indent="  ")
    ]


def _wrapped(text: str, *, indent: str = "") -> list[str]:
    return textwrap.wrap(text.strip(), _WIDTH, subsequent_indent=indent, break_on_hyphens=False)


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
