"""Pictures of what the guard predicted, what came of it, and what it saved: with Plotly here, with Matplotlib in ``matplotlib``.

Example:
    >>> from perfguard_optuna.visualization import plot_budget, plot_savings
    >>> plot_budget(study, quantity="time").show()                                                  # doctest: +SKIP
"""

from perfguard_optuna.visualization import matplotlib
from perfguard_optuna.visualization._plotly import plot_budget, plot_savings

__all__ = ["matplotlib", "plot_budget", "plot_savings"]
