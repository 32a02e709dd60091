"""What the verdicts of all domains come to: which teacher scores which domain, what is trained in which order, and the recipe of it. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from opd.config import Recipe, Stage, load_recipe
from opd.diagnose.measures import PairMeasures
from opd.diagnose.rules import SHORT, Decision, Verdict, useful_depth
from opd.errors import RecipeError
from opd.monitors.monitor import Monitors
from opd.teachers.kinds import TeacherKind

ROOM = 1.25  # over the longest answer that was seen
NEAR = 0.9  # of the teacher's probability on the student's likeliest tokens: enough for it to be found by sampling
FIRST = 0.25  # of the steps, before the student answers itself
MENDED = ("mend the stops",)  # outside of any recipe
ORDER: tuple[Verdict, ...] = (
    "mend the stops",
    "mend the template",
    "span view",
    "off-policy first",
    "cold start",
    "opd",
    "sft",
    "do not",
)


@dataclass(frozen=True)
class Advice:
    """Of one domain: its best teacher, and what to do with it."""

    domain: str
    pair: PairMeasures
    decision: Decision
    ranking: tuple[tuple[str, float | None], ...]  # teachers and their signal, best first

    @property
    def verdict(self) -> Verdict:
        return self.decision.rule.verdict

    def refined(self, number: int) -> bool:
        return any(one.number == number for one, _ in self.decision.refined)


def ranked(pairs: Sequence[PairMeasures]) -> list[PairMeasures]:
    """Best first: by signal on the student's answers; where it is not known, by AUROC, then by how near it is."""

    def worth(pair: PairMeasures) -> tuple[float, ...]:
        signal = -math.inf if pair.signal is None else pair.signal
        return signal, pair.auroc or 0.0, -(pair.kl or 0.0)

    return sorted(pairs, key=worth, reverse=True)


@dataclass(frozen=True)
class Recommendation:
    """The whole of it. `settings`: the recommended recipe; None: there is nothing that a recipe could do."""

    verdict: Verdict
    teachers: dict[str, str]  # domain -> teacher
    left_out: dict[str, str]  # domain -> why
    reasons: list[str] = field(default_factory=list)
    settings: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "teachers": self.teachers,
            "left_out": self.left_out,
            "reasons": self.reasons,
            "recipe": self.settings,
        }

    def recipe(self) -> Recipe | None:
        return None if self.settings is None else load_recipe(self.settings)

    def text(self) -> str:
        """The recipe as a file."""
        assert self.settings is not None
        head = [f"# {self.verdict}: as recommended by opd diagnose", *(f"# {reason}" for reason in self.reasons)]
        body = yaml.safe_dump(self.settings, sort_keys=False, allow_unicode=True, width=120)
        return (
            "\n".join(["".join(letter if letter.isprintable() else "?" for letter in line) for line in head])
            + f"\n{body}"
        )


def recommend(
    spec: Stage, advice: Sequence[Advice], sources: Mapping[int, set[str]], longest: int, given: bool
) -> Recommendation:
    """`sources`: number of a source -> its domains; `longest`: tokens of an answer; `given`: the recipe says itself how it trains."""
    useful = [one for one in advice if one.verdict != "do not"]
    left_out = {one.domain: one.decision.because for one in advice if one.verdict == "do not"}
    kept = {one.domain for one in useful}
    for at, domains in sources.items():  # a recipe takes sources, and no part of one
        for domain in left_out.keys() & domains if domains & kept else ():
            left_out[domain] += (
                f"; its rows stand beside others in {spec.prompts[at].source!r}: take them out of it first"
            )
    verdicts: list[Verdict] = [one.verdict for one in useful]
    verdict: Verdict = min(verdicts, key=ORDER.index) if verdicts else "do not"
    teachers = {one.domain: one.pair.teacher for one in useful}
    reasons = [f"{one.domain}: {one.pair.teacher}: {one.verdict}: {one.decision.because}" for one in advice]
    if not useful or verdict in MENDED:
        return Recommendation(verdict, teachers, left_out, reasons)
    settings = _base(spec, useful, sources)
    reasons += _objective(settings, spec, useful, given)
    reasons += _lengths(settings, spec, useful, longest, given)
    if stages := _stages(spec, useful):
        settings["stages"] = stages
    try:
        load_recipe(settings)
    except RecipeError as error:  # something else in the user's recipe does not go with it
        reasons.append(f"no recipe, since the given one has to be changed by hand first: {error}")
        return Recommendation(verdict, teachers, left_out, reasons)
    return Recommendation(verdict, teachers, left_out, reasons, settings)


def _base(spec: Stage, useful: Sequence[Advice], sources: Mapping[int, set[str]]) -> dict[str, Any]:
    """The stage as it was given, with the teachers and prompts that are worth it."""
    settings: dict[str, Any] = spec.model_dump(mode="json", exclude_defaults=True)
    settings.pop("name", None)
    if spec.monitors == Monitors().completed():
        settings.pop("monitors", None)  # as they come
    domains = {one.domain for one in useful}
    chosen: dict[str, list[str]] = {}
    for one in useful:
        chosen.setdefault(one.pair.teacher, []).append(one.domain)
    kept = {name: kind for name, kind in spec.teachers.items() if kind.role != "teacher" or name in chosen}
    settings["teachers"] = {
        name: _teacher(
            kind, chosen.get(name), [one for one in useful if one.pair.teacher == name], alone=len(chosen) == 1
        )
        for name, kind in kept.items()
    }
    if spec.eval.weight_average and len(chosen) < 2:
        settings["eval"] = {**settings.get("eval", {}), "weight_average": False}
    prompts = [dict(source) for source in settings["prompts"]]
    settings["prompts"] = [source for at, source in enumerate(prompts) if not sources.get(at) or sources[at] & domains]
    return settings


def _teacher(kind: TeacherKind, domains: list[str] | None, advice: Sequence[Advice], *, alone: bool) -> dict[str, Any]:
    found: dict[str, Any] = kind.model_dump(mode="json", exclude_defaults=True)
    if domains is not None and not alone:
        found["domains"] = domains
    if any(one.verdict == "span view" for one in advice):
        found["view"] = "bytes"
    elif any(one.verdict == "mend the template" and _better_behind_its_own(one.pair) for one in advice):
        view = kind.view.model_dump(mode="json", exclude_defaults=True)
        found["view"] = {**view, "kind": kind.view.name, "chat_template": "teacher"}
    return found


def _better_behind_its_own(pair: PairMeasures) -> bool:
    """Its own template; where nothing says which is better, a model knows the one that it came with."""
    known = pair.answers is not None and pair.answers.accuracy is not None and pair.own_template is not None
    return not known or pair.own_template > pair.answers.accuracy  # type: ignore[operator, union-attr]


def _objective(settings: dict[str, Any], spec: Stage, useful: Sequence[Advice], given: bool) -> list[str]:
    """One that the teachers can serve; a recipe's own is kept where it can stay."""
    if any(one.verdict == "span view" for one in useful):
        settings["objective"] = {"form": "gold"}
        return ["objective: spans of two tokenizers (gold)"]
    if given:
        return []
    if any("hidden" not in spec.teachers[one.pair.teacher].offers for one in useful):
        settings["objective"] = {"form": "policy_gradient"}
        return ["objective: policy gradient, since a teacher gives log-probs of sampled tokens alone"]
    masses = [one.pair.overlap_mass for one in useful if one.pair.overlap_mass is not None]
    if masses and min(masses) < NEAR:
        settings["objective"] = {"form": "direct", "divergence": "jsd", "beta": 0.5}
        return [
            f"objective: JSD, since {1 - min(masses):.0%} of a teacher's probability lies where the student would hardly ever look"
        ]
    settings["objective"] = {"form": "direct", "divergence": "reverse_kl"}
    return ["objective: exact reverse KL over the whole vocabulary"]


def _lengths(settings: dict[str, Any], spec: Stage, useful: Sequence[Advice], longest: int, given: bool) -> list[str]:
    rollout = dict(settings.get("rollout", {}))
    if all(one.refined(10) for one in useful):
        cap = max(useful_depth(one.pair.takeover) or 0 for one in useful)
        settings["rollout"] = {**rollout, "max_new_tokens": cap}
        return [f"rollouts of at most {cap} tokens: the teacher's signal is noise behind them"]
    if given:
        return []
    wanted = min(spec.rollout.max_new_tokens, SHORT * math.ceil(ROOM * longest / SHORT))
    settings["rollout"] = {**rollout, "max_new_tokens": wanted}
    return [f"rollouts of at most {wanted} tokens: the longest answer of either model had {longest}"]


def _stages(spec: Stage, useful: Sequence[Advice]) -> list[dict[str, Any]]:
    """More than one, or one of another kind than the given; none: the given one is right."""
    verdicts = {one.verdict for one in useful}
    steps = spec.train.steps
    imitate = {"rollout": {"teacher_share": 1.0}, "objective": [{"form": "cross_entropy", "on": ["teacher"]}]}
    if verdicts == {"sft"}:
        return [{"name": "sft", **imitate}]
    stages: list[dict[str, Any]] = []
    if verdicts & {"cold start", "off-policy first"}:
        stages.append({"name": "cold-start", **imitate, "train": {"steps": max(1, round(FIRST * steps))}})
    further = any(one.refined(11) for one in useful)
    if stages or further:
        stages.append({"name": "on-policy"})
    if further:
        advantage = {"teacher_weight": 0, "outcome_weight": 1, "baseline": "group", "std": True}
        term = {"form": "policy_gradient", "advantage": advantage, "surrogate": {"kind": "ppo"}}
        alone = {"teachers": {}, "eval": {"weight_average": False}}
        stages.append({"name": "rl", "rollout": {"samples": 8}, "objective": [term], **alone})
    return stages
