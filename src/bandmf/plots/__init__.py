"""Results -> figures. No privacy or error is computed here."""

from bandmf.plots.colors import COLORS, MECHANISMS, color
from bandmf.plots.figures import accuracy, best_bands, columns, mechanisms, memory, noise_costs, strategy
from bandmf.plots.planned import bands
from bandmf.plots.style import end_labels, panels, save

__all__ = [
    "COLORS",
    "MECHANISMS",
    "accuracy",
    "bands",
    "best_bands",
    "color",
    "columns",
    "end_labels",
    "mechanisms",
    "memory",
    "noise_costs",
    "panels",
    "save",
    "strategy",
]
