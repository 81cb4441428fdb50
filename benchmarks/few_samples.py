"""How long a dry run takes whose data are slow to read, beside the set-up of its objective.

    python benchmarks/few_samples.py                       # a minute
    python benchmarks/few_samples.py --batches 32 --ms 50

The objective trains a ResNet-18 on images of 224 x 224 pixels, each of which takes 10 ms to be read, for three epochs with an
evaluation. Its verdict is for an absent A100. "set-up" is the time until its first batch, in the same dry run. "samples read" are
those of the two data sets, of which the trial reads 22,000 in an epoch. "equal" compares the graph with that of the same
objective whose images take no time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from _record import parser_of, show
from torch.utils.data import DataLoader, Dataset, default_collate

from perfguard import resolve_device
from perfguard.capture import Answer, DryRuns
from perfguard.exceptions import CaptureError
from perfguard.workload import CapturedTrial


class Images(Dataset[Any]):
    """Images that take ``seconds`` each, and a label."""

    def __init__(self, number: int, seconds: float) -> None:
        self.number = number
        self.seconds = seconds
        self.num_read = 0

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.num_read += 1
        time.sleep(self.seconds)
        return torch.full((3, 224, 224), float(index % 7)), index % 1000


def own_collate(samples: Any) -> Any:
    """A collate function of the user's own."""
    images, labels = default_collate(samples)
    return {"images": images, "labels": labels}


def objective(batch: int, seconds: float, collate: Callable[[Any], Any], note: Callable[..., object]) -> None:
    """Train and evaluate for three epochs. ``note`` gets the time of the first batch, and the samples read at last."""
    from torchvision.models import resnet18  # type: ignore[import-untyped]

    model = resnet18().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train, test = Images(20_000, seconds), Images(2_000, seconds)
    loaders = [DataLoader(data, batch, shuffle=data is train, num_workers=4, collate_fn=collate) for data in (train, test)]
    note("begins", time.monotonic())
    try:
        for _ in range(3):
            for is_training, loader in zip((True, False), loaders, strict=True):
                model.train(is_training)
                with torch.set_grad_enabled(is_training):
                    for given in loader:
                        x, y = given.values() if isinstance(given, dict) else given
                        loss = F.cross_entropy(model(x.cuda()), y.cuda())
                        if is_training:
                            optimizer.zero_grad()
                            loss.backward()
                            optimizer.step()
    finally:
        note("read", train.num_read + test.num_read)


def dry_run(batch: int, seconds: float, collate: Callable[[Any], Any]) -> tuple[CapturedTrial | None, float, float, int]:
    """Return what a dry run has seen, its seconds, those of its set-up, and the number of samples that it has read."""
    noted: dict[str, float] = {}

    def answer(name: str, value: float) -> Answer:
        noted[name] = value
        return Answer(name, None, is_fact=True)

    runs = DryRuns(lambda ask: objective(batch, seconds, collate, ask), resolve_device("a100"), most_seconds=280.0)
    try:
        runs.start()
        time.sleep(4.0)  # the server imports PyTorch meanwhile, as it does before the first trial
        began = time.monotonic()
        found = runs.capture(answer)
        return found, time.monotonic() - began, noted["begins"] - began, int(noted["read"])
    except CaptureError as error:
        print(f"not judged: {error}")
        return None, time.monotonic() - began, noted.get("begins", began) - began, int(noted.get("read", 0))
    finally:
        runs.close()


def row_of(batch: int, seconds: float, name: str, collate: Callable[[Any], Any]) -> list[str]:
    found, took_s, set_up_s, num_read = dry_run(batch, seconds, collate)
    quick, *_ = dry_run(batch, 0.0, collate)
    if found is None:
        return [f"{batch:,}", name, f"{took_s:.1f}", f"{set_up_s:.1f}", f"{num_read:,}", "not judged", ""]
    is_equal = quick is not None and quick.graph.content_hash == found.graph.content_hash
    steps = "not known" if found.steps is None else f"{found.steps:,}"
    return [f"{batch:,}", name, f"{took_s:.1f}", f"{set_up_s:.1f}", f"{num_read:,}", steps, "yes" if is_equal else "no"]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[32, 387, 4096], help="samples in a batch (default: 32 387 4096)"
    )
    parser.add_argument("--ms", type=float, default=10.0, help="milliseconds for which a sample is read (default: 10)")
    arguments = parser.parse_args()
    collates = {"default_collate": default_collate, "its own": own_collate}
    columns = ["samples in a batch", "collate function", "dry run (s)", "of which set-up (s)", "samples read", "steps", "equal"]
    rows = [row_of(batch, arguments.ms / 1000, *item) for batch in arguments.batches for item in collates.items()]
    show("few-samples", columns, rows, record=arguments.record)


if __name__ == "__main__":
    main()
