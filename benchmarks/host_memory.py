"""What a script holds in the memory of the host: predicted by its dry run, and read from the system while it runs on the CPU.

    python benchmarks/host_memory.py

What is read is the proportional set size of the script's processes, and what they have in shared memory (`/dev/shm`), where the
batches of workers wait. Both are sampled, so a short peak may be missed. Quiet machines only: others use `/dev/shm`, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
from _record import parser_of, show

SCRIPT = """
import numpy as np, torch
from torch.utils.data import DataLoader, Dataset

class Images(Dataset):
    def __init__(self): self.kept = {kept}
    def __len__(self): return 2048
    def __getitem__(self, index): return torch.randn({shape}), index % 10

model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 7, 8), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(),
                            torch.nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Images(), {batch}, num_workers={workers}, persistent_workers={workers} > 0{more})
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    if step == 12: break
"""
CASES: dict[str, dict[str, object]] = {
    "no data, no workers": {"workers": 0, "batch": 32},
    "2 workers": {"workers": 2, "batch": 32},
    "8 workers": {"workers": 8, "batch": 32},
    "8 workers, batches of 128": {"workers": 8, "batch": 128},
    "8 workers that keep 8 batches ready": {"workers": 8, "batch": 64, "more": ", prefetch_factor=8"},
    "1.2 GiB of NumPy, 4 workers": {"workers": 4, "batch": 32, "kept": "np.ones((2**30 + 2**28) // 8)"},
    "4 million numbers in a list, 4 workers": {"workers": 4, "batch": 32, "kept": "[float(i) for i in range(4_000_000)]"},
}


def processes_of(pid: int) -> list[psutil.Process]:
    """The process and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return []


def held_bytes(pid: int) -> int:
    """Proportional set size of the process and its children."""
    total = 0
    for process in processes_of(pid):
        with suppress(OSError, psutil.Error):
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def shared_bytes() -> int:
    """What all processes of the machine have in shared memory."""
    found = os.statvfs("/dev/shm")
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def read(script: Path) -> int:
    """The most that the script holds while it runs."""
    before, most = shared_bytes(), 0
    with subprocess.Popen([sys.executable, str(script)], stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            most = max(most, held_bytes(process.pid) + shared_bytes() - before)
            time.sleep(0.05)
    if process.returncode:
        raise RuntimeError(f"{script} has ended with status {process.returncode}.")
    return most


def predicted(script: Path) -> dict[str, float]:
    """The median and the interval of `perfguard dry-run`."""
    words = [sys.executable, "-m", "perfguard.cli", "dry-run", str(script), "--gpu", "cpu", "--json"]
    found = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    return dict(found["host_memory_bytes"])


def main() -> None:
    """Show the table."""
    arguments: argparse.Namespace = parser_of(__doc__).parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            script = Path(folder, "train.py")
            script.write_text(SCRIPT.format(**{"kept": "None", "shape": "(3, 224, 224)", "more": ""} | case))
            said, most = predicted(script), read(script)
            is_inside = "yes" if said["low"] <= most <= said["high"] else "no"
            numbers = (f"{value / 2**20:,.0f}" for value in (said["median"], most))
            lines.append([name, *numbers, f"{said['median'] / most - 1:+.0%}", is_inside])
    show("host-memory", ["script", "predicted, MiB", "read, MiB", "error", "inside"], lines, record=arguments.record)


if __name__ == "__main__":
    main()
