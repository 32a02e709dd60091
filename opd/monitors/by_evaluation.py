"""Monitors that read the periodic evaluations (`eval.every`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from pydantic import Field

from opd.monitors.by_metrics import offered
from opd.monitors.changes import direct, gated, goes_by_teacher, slower, with_settings, with_terms
from opd.monitors.history import History
from opd.monitors.monitor import Alarm, Monitor, RecipeStage
from opd.settings import Positive


class FallingTogether(Monitor):
    """KL to the teacher and the score on held-out prompts both fall, three evaluations in a row (H): what is minimised is not what
    is wanted any more.
    """

    name = "together"
    reads = ("reverse_kl", "eval/DOMAIN")
    remedy = "stop; then the exact divergence, or a top-k one, in place of sampled tokens"
    evaluations: Positive = Field(3, le=100, description="of together: in a row")

    def alarm(self, history: History) -> Alarm | None:
        found = history.evaluations[-(self.evaluations + 1) :]
        if len(found) <= self.evaluations:
            return None
        scores, kls = [one.mean for one in found], [one.kl for one in found if one.kl is not None]
        falls = all(now < before for before, now in pairwise(scores)) and all(
            now < before for before, now in pairwise(kls)
        )
        if not falls or len(kls) < self.evaluations or scores[0] - scores[-1] <= found[-1].mean_stderr:
            return None
        return Alarm(
            scores[-1],
            scores[0],
            f"in {self.evaluations} evaluations the score fell from {scores[0]:.1%} to {scores[-1]:.1%} while KL to the teacher fell to "
            f"{kls[-1]:.3g} nats: the student pleases the teacher where it does not help",
        )

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        def exact(term: dict[str, object]) -> dict[str, object] | None:
            return direct(term) if goes_by_teacher(term) else None

        def topk(term: dict[str, object]) -> dict[str, object] | None:
            return {**direct(term), "support": "topk"} if goes_by_teacher(term) else None

        return offered(with_terms(stage, exact), with_terms(stage, topk), slower(stage))


class Saturation(Monitor):
    """A student that is its own and only teacher has nothing left to say: two evaluations in a row gain less than one standard error (H)."""

    name = "saturation"
    reads = ("eval/DOMAIN",)
    remedy = "a frontier curriculum: prompts that are sometimes answered right"
    errors: float = Field(
        1.0, gt=0, description="of diversity: standard errors by which pass@k falls; of others likewise"
    )
    evaluations: Positive = Field(2, le=100, description="of together: in a row")

    def alarm(self, history: History) -> Alarm | None:
        found = history.evaluations[-(self.evaluations + 1) :]
        if not history.facts.self_taught or len(found) <= self.evaluations or not found[-1].stderr:
            return None
        gains = [now.mean - before.mean for before, now in pairwise(found)]
        highest = self.errors * found[-1].mean_stderr
        if any(gain >= highest for gain in gains):
            return None
        return Alarm(
            max(gains),
            highest,
            f"{self.evaluations} evaluations in a row gained less than {highest:.1%}, which is chance: the student has nothing more to "
            "learn from itself on these prompts",
        )

    def remedies(self, stage: RecipeStage) -> Iterator[RecipeStage]:
        several = with_settings(stage, "rollout", samples=max(4, stage["rollout"]["samples"])) or stage
        return offered(with_terms(several, gated("paced")))
