"""Networks to try `perfguard predict` on. Each `build` function of hyperparameters returns a Workload.

perfguard predict examples/models.py:resnet --gpu a100 --batch-size 64
perfguard predict examples/models.py:transformer --gpu rtx4090
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from perfguard import TensorSpec, Workload


class Bottleneck(nn.Module):
    """He et al. 2016, figure 5, right."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet50(num_classes: int = 1000) -> nn.Sequential:
    """ResNet-50 for 224 × 224 images (He et al. 2016, table 1)."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    inputs = 64
    for stage, (width, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(depth):
            layers.append(Bottleneck(inputs, width, 2 if stage and block == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes))


def resnet(params: Mapping[str, Any]) -> Workload:
    """ResNet-50 on 224 × 224 images, SGD with momentum."""
    batch_size = params.get("batch_size", 32)
    return Workload(
        resnet50(),
        inputs=(batch_size, 3, 224, 224),
        targets=TensorSpec((batch_size,), "int64"),
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    )


class Classifier(nn.Module):
    """A small text classifier: embedding, Transformer encoder, mean over the sequence, linear."""

    def __init__(self, vocabulary: int, width: int, depth: int, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.encoder(self.embedding(tokens)).mean(1))
        return logits


def transformer(params: Mapping[str, Any]) -> Workload:
    """A Transformer encoder on 256 tokens, AdamW."""
    batch_size = params.get("batch_size", 32)
    return Workload(
        Classifier(30_000, params.get("width", 512), params.get("depth", 6), 20),
        inputs=TensorSpec((batch_size, 256), "int64"),
        targets=TensorSpec((batch_size,), "int64"),
        loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-4),
    )
