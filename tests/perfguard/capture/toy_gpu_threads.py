"""A process that sees a device with threads of its own for backward passes, has run one, and only then begins dry runs.

Where there is no GPU, a backend in Python stands for it. Prints the steps that both kinds of dry runs show.
"""

from typing import Any

import torch
from torch import nn

if not torch.cuda.is_available():
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("toy")

from perfguard import resolve_device
from perfguard.capture import Answer, DryRuns
from perfguard.capture.first_forward import FirstForward
from perfguard.exceptions import CaptureError

CPU = resolve_device("cpu")


def train(ask: object = None) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


train()
found: list[Any] = []
runs = DryRuns(train, CPU)
for _ in range(2):
    print(runs.capture(lambda: Answer("", 0)).steps)
runs.close()
with FirstForward(CPU, found.append, lambda: None, problem=CaptureError("why")):
    train()
print(found[0].steps)
