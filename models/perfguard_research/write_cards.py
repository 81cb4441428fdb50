r"""Write a model card for each set of weights that `perfguard train` made, from the JSON beside them.

python -m perfguard_research.write_cards
"""

from __future__ import annotations

import importlib
import json
import textwrap
from collections import defaultdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from perfguard_research.registry import learner_class

_PACKAGES = ("perfguard_models", "perfguard_research")
_WIDTH = 130
_SOURCES = {
    "gpumemnet": "GPUMemNet (itu-rad/GPUMemNet, CC-BY-4.0)",
    "gpumemnet-mlp": "GPUMemNet's perceptrons (itu-rad/GPUMemNet, CC-BY-4.0)",
    "timm-benchmark": "timm's benchmark results (huggingface/pytorch-image-models, Apache-2.0)",
    "neusight-e2e": "NeuSight's transformers (sitar-lab/NeuSight, MIT)",
    "microsoft/vidur": "Vidur's kernels (microsoft/vidur, MIT)",
    "baidu-research/DeepBench": "DeepBench (baidu-research/DeepBench, Apache-2.0)",
    "collected": "ours (`perfguard collect`)",
    "": "ours",
}
"""Tables of runs name their sources by repository, OWNER/NAME."""
_FITS = {
    "failed": "failed", "caught": "caught", "caught_at_risk": "at risk", "fitting": "fitting", "pruned": "pruned",
    "pruned_at_risk": "at risk", "pairs": "pairs", "balanced": "balanced accuracy",
}  # fmt: skip
_OF_MEMORY = """
Memory was measured only on the A100. For the RTX 3090 and 4090, the data only say which batches fitted. cuDNN's benchmark mode
was on."""
_OF_ALL = "Do not use it to compare GPUs that are not in the list above, or for billing."
_OF_CPUS = """
The table is `benchmarks/data/cpu.csv.gz`. It is from one machine: two cores of an AMD EPYC, Linux with glibc 2.36. On another
CPU, the rates are measured, and the errors are not known. Networks are small: a step takes up to 30 ms by the roofline. One row
in eight is in bfloat16, which this machine has no units for. Compiled steps are not in the data."""
_LIMITS = {
    "memory-forest": f"""{_OF_MEMORY} With this mode off, convolutional networks need less memory than predicted.
Utilisation was measured only for perceptrons on the A100. The data has no recurrent networks. {_OF_ALL}""",
    "two-clocks": f"""
Times are for one GPU. They leave out communication between GPUs, and waiting for data. On most GPUs the networks are those of
torchvision at small batches. Training of transformers was measured on few GPUs. If a step has small operators, its time depends
on the host that launches them. Hosts differ more than GPUs of one kind do. So on another machine, such a step can be wrong by a
factor of two or more until some runs are measured there. Of recurrent networks, the data has single layers and timm's sequencer
only. {_OF_ALL}""",
    **dict.fromkeys(("cpu-two-clocks", "cpu-memory-forest"), _OF_CPUS),
}
"""What each kind of weights must not be used for. The papers' weights have the next one."""
_LIMITS_OF_PAPERS = f"""{_OF_MEMORY} Times are for half precision on the RTX 3090 and 4090. The data has no times of float32
training, of steps on several GPUs, or of recurrent networks. {_OF_ALL}"""
_HELD_OUT = """
In each split, the predictor was trained without the family, the source or the GPU. Errors are |predicted / measured - 1| (for
utilisation: the difference): mean ± spread over the folds, median and 90th percentile. Coverage and median width are those of 90%
intervals that were calibrated on the other folds.
"""


_WHAT_FITS = 'A run is pruned if its predicted median exceeds the card\'s memory. Columns "at risk" use the default risk.'


def card_of(name: str, card: dict[str, Any], num_bytes: int) -> str:
    """The text."""
    learner = next(base for base in learner_class(card["predictor"]).__mro__ if "name" in vars(base))  # not the part that fits it
    about = (importlib.import_module(learner.__module__).__doc__ or "").strip()
    lines = [f"# {name}", "", about, "", "## Data", ""]
    lines += _data_lines(card["rows"])
    lines += ["", *_wrapped(card["left_out"]), "", "## Errors on held-out runs", ""]
    lines += [*_wrapped(_HELD_OUT), ""]
    lines += ["| split | runs | quantity | rows | mean | median | 90th | coverage | width |", "| --- " * 9 + "|"]
    for line in card["errors"]:
        values = f"{line['mean']:.1%} ± {line['spread']:.1%} | {line['median']:.1%} | {line['p90']:.1%}"
        interval = "- | -" if line["coverage"] is None else f"{line['coverage']:.1%} | {line['width']:.0%}"
        lines.append(f"| {line['split']} | {line['group']} | {line['quantity']} | {line['rows']:,} | {values} | {interval} |")
    if card["fits"]:
        lines += ["", _WHAT_FITS, ""]
        lines += [f"| split | runs | {' | '.join(_FITS.values())} |", "| --- " * (2 + len(_FITS)) + "|"]
        for fit in card["fits"]:
            cells = [_cell(fit[key]) for key in _FITS]
            lines.append(f"| {fit['split']} | {fit['group']} | {' | '.join(cells)} |")
    limits = _LIMITS.get(name, _LIMITS_OF_PAPERS)
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
