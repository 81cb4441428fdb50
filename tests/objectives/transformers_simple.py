"""A sequence classifier, fine-tuned by Hugging Face's Trainer."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import optuna
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, EvalPrediction, Trainer, TrainingArguments, set_seed


class Reviews(Dataset[dict[str, torch.Tensor]]):
    """Token numbers and labels, as a tokenizer makes them of reviews."""

    def __init__(self, number: int) -> None:
        self.tokens, self.labels = torch.randint(0, 1000, (number, 32)), torch.randint(0, 2, (number,))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        mask = torch.ones_like(self.tokens[index])
        return {"input_ids": self.tokens[index], "attention_mask": mask, "labels": self.labels[index]}


def compute_metrics(eval_pred: EvalPrediction) -> dict[str, float]:
    predictions = np.argmax(eval_pred.predictions, axis=-1)
    return {"accuracy": float((predictions == eval_pred.label_ids).mean())}


def objective(trial: optuna.Trial) -> float:
    set_seed(42)
    sizes: Any = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = BertForSequenceClassification(BertConfig(vocab_size=1000, **sizes))
    arguments = TrainingArguments(
        output_dir=f"{tempfile.gettempdir()}/transformers_simple",
        learning_rate=trial.suggest_float("learning_rate", 1e-5, 5e-5, log=True),
        per_device_train_batch_size=trial.suggest_categorical("per_device_train_batch_size", [8, 16]),
        weight_decay=trial.suggest_float("weight_decay", 1e-3, 1e-1, log=True),
        num_train_epochs=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Reviews(160), eval_dataset=Reviews(64), compute_metrics=compute_metrics
    )
    trainer.train()
    return float(trainer.evaluate()["eval_accuracy"])
