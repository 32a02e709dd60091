"""The arms: ways to make one student of several specialists, or without them, at equal FLOPs.

Every arm sees the same questions; those that imitate see the same gold answers as the specialists did. An arm without
a teacher or without sampling costs less per token and takes more steps: `per_token` counts FLOPs over 2N, of reading and
sampling (1), of a teacher's pass (1) and of training (3). Arms with a reward draw four samples of a quarter of the
prompts, RL eight of an eighth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from integration.editions import SFT, Edition

OUTCOME = {"teacher_weight": 0, "outcome_weight": 1, "baseline": "group", "std": True}
GRPO = {
    "form": "policy_gradient", "advantage": OUTCOME, "surrogate": {"kind": "ppo", "low": 0.2, "high": 0.28},
    "correction": {"kind": "tis", "high": 2.0},
}  # fmt: skip
EXACT = {"form": "direct", "divergence": "reverse_kl"}
FORWARD = {"form": "direct", "divergence": "forward_kl"}
TOP_K = {**EXACT, "support": "topk", "k": 16}
SAMPLED: dict[str, Any] = {"form": "policy_gradient"}
SAMPLED_REWARD = {"form": "policy_gradient", "advantage": {"outcome_weight": 1, "baseline": "group", "std": True}}
WHOLE = 5.0  # per token of an arm that samples, asks a teacher and trains
MERGES: dict[str, tuple[str, list[float]]] = {  # no training: which key is tried with which values
    "merge-average": ("", [1.0]),
    "merge-task-arithmetic": ("weights", [0.3, 0.6]),
    "merge-ties": ("scale", [0.5, 1.0]),
    "merge-stack": ("weights", [0.3, 0.6]),
}


@dataclass(frozen=True)
class Arm:
    """What a recipe of the edition becomes. `rate`: which of the edition's learning rates are tried."""

    change: Callable[[Edition, dict[str, Any], int], None]  # the recipe, and the steps that a whole arm would take
    rate: str = "distil"
    scored: bool | str = False  # whether teachers read what is trained on: all of it, or that of one source
    specialists: bool = False  # whether it needs them: their cost belongs to its total
    per_token: float = WHOLE
    imitates: bool = False  # what it learns from are samples of the specialists

    def recipe(self, edition: Edition, rate: float, seed: int, origin: str = "start") -> dict[str, Any]:
        recipe = edition.recipe(edition.start, edition.domains, "tune", seed)
        recipe["train"]["lr"] = rate
        if self.specialists:
            kind = "frozen" if edition.name == "tiny" else "adapter"
            recipe["teachers"] = {
                domain: {"kind": kind, "model": edition.specialist(domain, origin)} for domain in edition.domains
            }
        steps = max(round(edition.steps * WHOLE / self.per_token), 1)
        recipe["train"]["steps"] = steps
        self.change(edition, recipe, steps)
        recipe["eval"]["every"] = max(steps // 4, 1)
        return recipe


def _distil(objective: Any, samples: int = 1) -> Callable[[Edition, dict[str, Any], int], None]:
    def change(edition: Edition, recipe: dict[str, Any], steps: int) -> None:
        recipe["objective"] = objective
        _samples(edition, recipe, samples)

    return change


def _samples(edition: Edition, recipe: dict[str, Any], samples: int) -> None:
    recipe["rollout"] |= {"prompts": max(edition.rollouts // samples, 1), "samples": samples}


def _mixed_rl(edition: Edition, recipe: dict[str, Any], steps: int) -> None:
    recipe["objective"] = GRPO
    _samples(edition, recipe, 8)


def _cascaded_rl(edition: Edition, recipe: dict[str, Any], steps: int) -> None:
    """One domain after the other; all are measured throughout."""
    _mixed_rl(edition, recipe, steps)
    sources = recipe["prompts"]
    each = max(steps // len(edition.domains), 1)
    recipe["train"]["steps"] = each
    recipe["stages"] = [
        {"name": source["domain"], "prompts": [source], "eval": {"every": 0, "prompts": 20}} for source in sources
    ]


def _gold(edition: Edition, recipe: dict[str, Any], steps: int) -> None:
    recipe["objective"] = SFT
    recipe["rollout"]["data_share"] = 1.0


def _gold_then_rl(edition: Edition, recipe: dict[str, Any], steps: int) -> None:
    """Half of the budget each."""
    whole = edition.steps / 2
    recipe["stages"] = [
        {
            "name": "gold",
            "objective": SFT,
            "rollout": {"data_share": 1.0},
            "train": {"steps": max(round(whole * WHOLE / 3), 1), "lr": edition.rates["distil"][0]},
        },
        {
            "name": "rl",
            "objective": GRPO,
            "rollout": {"prompts": max(edition.rollouts // 8, 1), "samples": 8},
            "train": {"steps": max(round(whole * WHOLE / 4), 1)},
        },
    ]


def _teacher_samples(edition: Edition, recipe: dict[str, Any], steps: int) -> None:
    recipe["objective"] = SFT
    if not edition.draws_ahead:
        recipe["rollout"]["teacher_share"] = 1.0
        return
    specialists = recipe.pop("teachers")
    recipe["rollout"]["data_share"] = 1.0
    for source in recipe["prompts"]:
        source["source"] = edition.answers(specialists[source["domain"]]["model"])


def _teacher_samples_then_opd(edition: Edition, recipe: dict[str, Any], steps: int) -> None:
    """Half of the budget each: the specialists' own answers, then the student's, with the exact divergence."""
    whole, specialists = edition.steps / 2, recipe["teachers"]
    answered = [
        source | ({"source": edition.answers(specialists[source["domain"]]["model"])} if edition.draws_ahead else {})
        for source in recipe["prompts"]
    ]
    recipe["stages"] = [
        {
            "name": "off-policy",
            "prompts": answered,
            "objective": SFT,
            "rollout": {"data_share": 1.0} if edition.draws_ahead else {"teacher_share": 1.0},
            "train": {"steps": max(round(whole * WHOLE / 4), 1)},
        },
        {"name": "on-policy", "objective": EXACT, "train": {"steps": max(round(whole), 1)}},
    ]


def _by_need(edition: Edition, recipe: dict[str, Any], steps: int) -> None:
    """The exact divergence, with shares of prompts that follow each domain's distance to its teacher."""
    recipe["objective"] = EXACT
    recipe["shares"] = {"kind": "gap", "of": "kl"}


def _opd(objective: Any, samples: int = 1) -> Arm:
    return Arm(_distil(objective, samples), scored=True, specialists=True)


ARMS: dict[str, Arm] = {
    "opd-exact": _opd(EXACT),
    "opd-topk": _opd(TOP_K),
    "opd-sampled": _opd(SAMPLED),
    "opd-forward": _opd(FORWARD),
    "opd-need": Arm(_by_need, scored=True, specialists=True),
    "opd-exact-reward": _opd([EXACT, GRPO], 4),
    "opd-topk-reward": _opd([TOP_K, GRPO], 4),
    "opd-sampled-reward": _opd(SAMPLED_REWARD, 4),
    "mixed-rl": Arm(_mixed_rl, "rl", per_token=4),
    "cascaded-rl": Arm(_cascaded_rl, "rl", per_token=4),
    "sft-gold": Arm(_gold, per_token=3),
    "sft-gold-rl": Arm(_gold_then_rl, "rl", per_token=4),
    "sft-teacher-opd": Arm(_teacher_samples_then_opd, specialists=True, scored="student", per_token=4.5, imitates=True),
    "sft-teacher": Arm(_teacher_samples, specialists=True, per_token=4, imitates=True),
}


def merge(edition: Edition, arm: str, value: float, origin: str) -> dict[str, Any]:
    """A recipe that merges the specialists and trains nothing."""
    key, _ = MERGES[arm]
    kind = arm.removeprefix("merge-").replace("-", "_")
    made: dict[str, Any] = {"kind": kind, "models": [edition.specialist(name, origin) for name in edition.domains]}
    made |= {key: value} if key else {}
    made |= {"base": edition.start} if kind in ("task_arithmetic", "ties") else {}
    recipe = edition.recipe(edition.start, edition.domains, "tune", 0)
    recipe["student"] = {"merge": made}
    recipe["objective"] = SFT
    recipe["rollout"] |= {"prompts": 1, "data_share": 1.0}
    recipe["train"] = {"learn": False, "steps": 1}
    recipe["eval"] = {"prompts": 0}
    return recipe


MAIN = ["opd-exact", "opd-sampled-reward", "mixed-rl", "sft-gold", "sft-teacher"]
