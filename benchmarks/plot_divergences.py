"""Draws docs/figures/: what each divergence makes of a two-mode teacher, and how time and memory scale.

pip install matplotlib
python benchmarks/plot_divergences.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from opd.divergences.kinds import Formula

HERE = Path(__file__).parent
FIGURES = HERE.parent / "docs" / "figures"
FITS: list[tuple[str, str, dict[str, float]]] = [
    ("forward KL", "forward_kl", {}),
    ("skew KL 0.1", "skew_kl", {"alpha": 0.1}),
    ("JSD 0.5", "jsd", {"beta": 0.5}),
    ("skew reverse KL 0.1", "skew_reverse_kl", {"alpha": 0.1}),
    ("reverse KL", "reverse_kl", {}),
]


def fit(kind: str, params: dict[str, float], grid: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """The Gaussian (on the grid) of least divergence: best of several starts, since mode-seeking losses have local minima."""
    formula, best = Formula.of(kind, params), (float("inf"), grid)
    for start in (-2.5, 0.0, 2.0):
        mean = torch.tensor(start, dtype=torch.float64, requires_grad=True)
        spread = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
        adam = torch.optim.Adam([mean, spread], lr=0.05)
        for _ in range(500):
            student = (-((grid - mean) ** 2) / (2 * (2 * spread).exp())).log_softmax(-1)
            value = formula(student[None], teacher[None]).sum()
            adam.zero_grad()
            value.backward()
            adam.step()
        if value.item() < best[0]:
            best = (value.item(), student.detach())
    return best[1]


def draw_fits() -> None:
    grid = torch.linspace(-6, 6, 241, dtype=torch.float64)
    modes = (
        0.65 * torch.exp(-((grid + 2.0) ** 2) / (2 * 0.7**2)) / 0.7
        + 0.35 * torch.exp(-((grid - 2.2) ** 2) / (2 * 0.5**2)) / 0.5
    )
    teacher = (modes / modes.sum()).log()
    figure, axes = plt.subplots(1, len(FITS), figsize=(14, 2.8), sharey=True)
    for axis, (title, kind, params) in zip(axes, FITS, strict=True):
        axis.fill_between(grid, teacher.exp(), color="0.85", label="teacher")
        axis.plot(grid, fit(kind, params, grid, teacher).exp(), color="tab:blue", label="student")
        axis.set(title=title, yticks=[])
    axes[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(FIGURES / "divergence-fits.svg")


def draw_scaling() -> None:
    rows = json.loads((HERE / "results" / "divergence-scaling-cuda.json").read_text(encoding="utf-8"))["rows"]
    figure, axes = plt.subplots(2, 3, figsize=(12, 5))
    for column, (axis, field) in enumerate((("N", "n"), ("V", "v"), ("teachers", "teachers"))):
        for mode, colour in (("fast", "tab:orange"), ("small", "tab:blue")):
            mine = [row for row in rows if row["axis"] == axis and row["mode"] == mode]
            for line, quantity in enumerate(("ms", "beyond_gradients_gib")):
                axes[line, column].plot(
                    [row[field] for row in mine], [row[quantity] for row in mine], "o-", color=colour, label=mode
                )
                axes[line, column].set(
                    xlabel={"N": "tokens N", "V": "vocabulary V", "teachers": "mixed teachers"}[axis]
                )
    for axis in axes.flat:
        axis.set_ylim(0, None)
    axes[0, 0].set_ylabel("ms")
    axes[1, 0].set_ylabel("GiB beyond the gradients")
    axes[0, 0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(FIGURES / "divergence-scaling.svg")


if __name__ == "__main__":
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "opd"})
    FIGURES.mkdir(parents=True, exist_ok=True)
    draw_fits()
    draw_scaling()
