"""Data of the programs of the corpus."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset


def images(number: int, batch: int, *, channels: int = 3, size: int = 16, classes: int = 10) -> DataLoader[Any]:
    """Images with labels."""
    return DataLoader(TensorDataset(torch.randn(number, channels, size, size), torch.arange(number) % classes), batch)


def rows(number: int, batch: int, *, width: int = 32, classes: int = 4) -> DataLoader[Any]:
    """Rows of a table with labels."""
    return DataLoader(TensorDataset(torch.randn(number, width), torch.arange(number) % classes), batch)


def tokens(number: int, batch: int, *, length: int = 24, vocabulary: int = 100) -> DataLoader[Any]:
    """Texts of equal length, with the next token of each token."""
    text = torch.randint(0, vocabulary, (number, length + 1))
    return DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch)


class Pairs(Dataset[Any]):
    """Two views of each image, as for contrastive learning."""

    def __init__(self, number: int) -> None:
        self.images = torch.randn(number, 3, 16, 16)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index]
        return image, image.flip(-1)
