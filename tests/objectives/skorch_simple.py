"""A network as a scikit-learn classifier: skorch, with Optuna's pruning callback."""

from __future__ import annotations

import numpy as np
import optuna
import skorch
import torch
from optuna_integration import SkorchPruningCallback
from sklearn.metrics import accuracy_score
from torch import nn

N_TRAIN, N_TEST = 2000, 500
GENERATOR = np.random.default_rng(0)
X_train = GENERATOR.random((N_TRAIN, 28 * 28), dtype=np.float32)
y_train = GENERATOR.integers(0, 10, N_TRAIN)
X_test = GENERATOR.random((N_TEST, 28 * 28), dtype=np.float32)
y_test = GENERATOR.integers(0, 10, N_TEST)


class ClassifierModule(nn.Module):
    def __init__(self, trial: optuna.Trial) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        in_features = 28 * 28
        for i in range(trial.suggest_int("n_layers", 1, 3)):
            out_features = trial.suggest_int(f"n_units_l{i}", 4, 128, log=True)
            layers += [nn.Linear(in_features, out_features), nn.ReLU()]
            layers.append(nn.Dropout(trial.suggest_float(f"dropout_{i}", 0, 1)))
            in_features = out_features
        self.model = nn.Sequential(*layers, nn.Linear(in_features, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.softmax(self.model(x), dim=-1)


def objective(trial: optuna.Trial) -> float:
    model = ClassifierModule(trial)
    net = skorch.NeuralNetClassifier(
        model,
        max_epochs=trial.suggest_int("max_epochs", 2, 4),
        lr=0.1,
        device="cuda" if torch.cuda.is_available() else "cpu",
        callbacks=[SkorchPruningCallback(trial, "valid_acc")],
        verbose=0,
    )
    net.fit(X_train, y_train)
    return float(accuracy_score(y_test, net.predict(X_test)))
