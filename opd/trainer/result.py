"""What a step gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from opd.models.packing import Pack
from opd.objective.micro import TokenStatistics
from opd.trainer.metrics import step_metrics


@dataclass(repr=False)
class StepResult:
    """What a step did. By hand: `result.loss`, or all that is known as `result.metrics`, by the names of metrics.jsonl."""

    measured: dict[str, float]  # by gates and other parts of terms
    statistics: list[tuple[Pack, TokenStatistics]] = field(default_factory=list)  # of every micro-batch
    norms: list[float] = field(default_factory=list)  # of the gradient, one per update
    rate: float = 0.0
    step: int = 0

    @cached_property
    def metrics(self) -> dict[str, Any]:
        rollouts = list({rollout.id: rollout for pack, _ in self.statistics for rollout in pack.rollouts}.values())
        if not rollouts:
            return dict(self.measured)
        extra = {"lr": self.rate, "grad_norm": max(self.norms), **self.measured}
        found = step_metrics("", self.step, rollouts, self.statistics, {}, {}, extra, updates=len(self.norms))
        return {name: value for name, value in found.items() if name != "stage" and value is not None}

    @property
    def loss(self) -> float:
        """Of the batch: the mean over updates, if there were several."""
        return float(self.metrics.get("loss", 0.0))

    def __repr__(self) -> str:
        shown = {name: self.metrics[name] for name in ("loss", "reverse_kl", "grad_norm", "lr") if name in self.metrics}
        return f"StepResult(step={self.step}, {', '.join(f'{name}={value:.4g}' for name, value in shown.items())})"
