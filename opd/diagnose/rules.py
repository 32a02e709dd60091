"""The decision table: one row is a condition, a verdict, a remedy and what it rests on. The first row that matches wins. No torch here.

Evidence: P, published; near P, a published number that we have rounded or moved; H, a heuristic. What was calibrated on the
pairs of the quickstart says so: all four of its teachers bring their student to 0.96 or more of their own level, at an initial KL of
0.23 to 0.57 nats, an overlap of 0.70 to 0.74 (0.698 over few prompts) and answers of four to seven tokens, so none of these alone may turn a teacher away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import yaml

from opd.common.errors import RecipeError
from opd.diagnose.measures import AnswerStatistics, Depth, PairMeasures
from opd.monitors.monitor import Monitors
from opd.recipe import Recipe, Stage, load_recipe
from opd.teachers.kinds import TeacherKind

Verdict = Literal[
    "span view", "fix the template", "fix the stops", "do not", "off-policy first", "cold start", "sft", "opd"
]

ALIGNED = 0.9  # share of the text that spans pair
TEMPLATE = 0.01  # nats per token
STOPS = 0.8  # probability of stopping at its own stops
AGREED = 0.3  # share of the student's ends at which the teacher would end, too
AUROC = 0.55
NOTHING = 0.01  # nats per token: where accuracies are not known, a KL that is none
ERRORS, WEAKER = (
    2.0,
    1.0,
)  # standard errors: of a significant gap; of a significantly weaker teacher, which would do harm
LEAST_GAP = 0.02
WEAK = 0.05  # pass@k
OVERLAP, UNLIKE, FAR, MASS, ORIGIN = 0.7, 0.65, 0.15, 0.99, 0.5  # UNLIKE: an overlap that is enough on its own
EXCESS, SHORT = 0.1, 16  # of the KL; tokens of an answer
TAKEOVER, MAY = 0.05, 1.0  # smallest gain in accuracy by taking over; standard errors within which it may be that


class Case(NamedTuple):
    """One teacher in one domain, with the context that the rules need."""

    student: AnswerStatistics
    pair: PairMeasures
    target: float | None = None  # target accuracy
    rivals: int = 0  # other teachers for this domain


@dataclass(frozen=True)
class Rule:
    number: int
    when: str
    verdict: Verdict
    remedy: str
    evidence: str
    found: Callable[[Case], str | None]  # the numbers for which it matches; None: no match


@dataclass(frozen=True)
class Refinement:
    """Advice that is added to a positive verdict."""

    number: int
    when: str
    remedy: str
    evidence: str
    found: Callable[[Case], str | None]


class Decision(NamedTuple):
    rule: Rule
    because: str
    refined: tuple[tuple[Refinement, str], ...]


def decide(case: Case) -> Decision:
    for rule in RULES:
        because = rule.found(case)
        if because is not None:
            distils = rule.verdict in ("opd", "cold start", "off-policy first")
            some = [(one, found) for one in REFINEMENTS if distils and (found := one.found(case)) is not None]
            return Decision(rule, because, tuple(some))
    raise AssertionError("the last row always matches")


# Conditions of the table


def _unaligned(case: Case) -> str | None:
    pair = case.pair
    if pair.ids_differ and pair.aligned is not None and pair.aligned < ALIGNED:
        return f"{pair.ids_differ:,} ids differ, and spans pair {pair.aligned:.0%} of the text"
    return None


def _other_tokenizer(case: Case) -> str | None:
    pair = case.pair
    if not pair.ids_differ or pair.crosses:
        return None
    share = "" if pair.aligned is None else f"; spans pair {pair.aligned:.0%} of the text"
    return f"{pair.ids_differ:,} ids differ{share}"


def _other_template(case: Case) -> str | None:
    pair, answers = case.pair, case.pair.answers
    if pair.template is None or pair.template <= TEMPLATE:
        return None
    text = f"{pair.template:.2g} nats per token"
    if answers is None or answers.accuracy is None or pair.own_template is None:
        return text
    return f"{text}; {answers.accuracy:.0%} right with the student's template, {pair.own_template:.0%} with its own"


def _lost_stops(case: Case) -> str | None:
    """Both, if known: a limit that is too low truncates its own answers, but not the dataset's."""
    stops = case.pair.stops
    known = [value for value in (stops.own, stops.reference) if value is not None]
    if not known or max(known) >= STOPS:
        return None
    instead = "" if stops.instead is None else f"; it predicts id {stops.instead[0]} ({stops.instead[1]!r}) there"
    return f"it stops with probability {max(known):.2f} where answers end{instead}"


def _unlike_stops(case: Case) -> str | None:
    stops = case.pair.stops
    if stops.student is None or stops.student >= AGREED:
        return None
    return f"it would end at {stops.student:.0%} of {stops.ends} ends of the student's"


def has_gap(pair: PairMeasures) -> bool | None:
    """Whether the teacher is significantly better; None: not known."""
    if pair.gap is None or pair.gap_stderr is None:
        return None
    return pair.gap > max(LEAST_GAP, ERRORS * pair.gap_stderr)


def _no_gap(case: Case) -> str | None:
    pair, gap = case.pair, has_gap(case.pair)
    if gap is None:
        return f"KL of {pair.kl:.3f} nats per token" if pair.kl is not None and pair.kl < NOTHING else None
    assert pair.gap is not None
    assert pair.gap_stderr is not None
    text = f"gap {pair.gap:+.2f} ± {pair.gap_stderr:.2f}"
    if pair.gap < -max(LEAST_GAP, WEAKER * pair.gap_stderr):
        return f"{text}: it is the weaker one"
    if not gap and (pair.auroc is None or pair.auroc < AUROC):
        return text + ("" if pair.auroc is None else f", AUROC {pair.auroc:.2f}")
    return None


def _too_weak(case: Case) -> str | None:
    share = case.student.pass_at
    return f"pass@{case.student.samples} is {share:.1%}" if share is not None and share < WEAK else None


def _apart(case: Case) -> str | None:
    """The published limits on overlap and KL only count if the teacher is far in another way as well."""
    pair = case.pair
    if pair.overlap is not None and pair.overlap < UNLIKE:
        return f"{pair.overlap:.0%} of the 16 likeliest tokens agree"
    if pair.overlap is not None and pair.overlap < OVERLAP:
        text = f"{pair.overlap:.0%} of the 16 likeliest tokens agree"
    elif pair.kl is not None and pair.kl > FAR:
        text = f"KL {pair.kl:.2f} nats per token"
    else:
        return None
    if pair.overlap_mass is not None and pair.overlap_mass < MASS:
        return (
            f"{text}, and {1 - pair.overlap_mass:.1%} of its probability lies outside the student's 16 likeliest tokens"
        )
    if pair.origin is not None and pair.origin < ORIGIN:
        return f"{text}, and weights of another origin (cosine {pair.origin:.2f})"
    return None


def _short_horizon(case: Case) -> str | None:
    """Nothing is gained after the student's own words: the teacher is not further away there, and taking over does not help."""
    pair, length = case.pair, case.student.length
    inside = [depth for depth in pair.takeover if depth.depth]
    helps = any(depth.advantage > max(TAKEOVER, MAY * depth.stderr) for depth in inside)
    if helps or not (inside or pair.excess is not None):
        return None
    if pair.excess is not None and pair.excess < EXCESS:
        return f"the KL after the student's words is {pair.excess:+.0%} of that after the teacher's, and taking over gains nothing"
    if pair.excess is None and length < SHORT:
        return f"answers of {length:.0f} tokens, and taking over gains nothing"
    return None


def _otherwise(case: Case) -> str:
    pair = case.pair
    parts = [
        None if pair.gap is None else f"gap {pair.gap:+.2f}",
        None if pair.auroc is None else f"AUROC {pair.auroc:.2f}",
        None if pair.kl is None else f"KL {pair.kl:.2f}",
        None if pair.overlap is None else f"overlap {pair.overlap:.0%}",
    ]
    return ", ".join(part for part in parts if part) or "nothing argues against it"


def useful_depth(takeover: tuple[Depth, ...]) -> int | None:
    """The depth after which taking over gains less than the threshold; None: it gains at every depth."""
    deep = None
    for depth in sorted(takeover, reverse=True):
        if depth.advantage >= TAKEOVER:
            break
        deep = depth.depth
    return deep


def _noise(case: Case) -> str | None:
    """Whether there is a depth to cap at. Answers shorter than SHORT are not capped, because only their end would be cut."""
    depth = useful_depth(case.pair.takeover)
    if depth is None or depth < SHORT:
        return None
    return f"after {depth} tokens taking over gains less than {TAKEOVER:.2f}"


def _beyond(case: Case) -> str | None:
    answers, target = case.pair.answers, case.target
    if target is None or answers is None or answers.accuracy is None or target <= answers.accuracy:
        return None
    return f"the target is {target:.0%}, the teacher has {answers.accuracy:.0%}"


def _ranked(case: Case) -> str | None:
    signal = case.pair.signal
    return None if not case.rivals or signal is None else f"signal {signal:+.2f}; other teachers: {case.rivals}"


COLD = "Train a stage on the teacher's own answers first (teacher_share: 1, form: cross_entropy), then diagnose its result; if nothing changes, use another teacher."
RULES = (
    Rule(
        1,
        "tokenizers differ, and less than 90 % of the text aligns",
        "do not",
        "Use a teacher whose tokenizer is closer to the student's.",
        "H",
        _unaligned,
    ),
    Rule(
        1,
        "tokenizers differ",
        "span view",
        "Let it read the text in its own tokens (view: bytes) and compare spans (form: gold).",
        "P",
        _other_tokenizer,
    ),
    Rule(
        2,
        "chat templates differ",
        "fix the template",
        "Fix the worse of the two templates, or let a teacher that is better with its own template read that (view: {chat_template: teacher}); diagnose again.",
        "P",
        _other_template,
    ),
    Rule(
        3,
        f"the teacher's stop mass is below {STOPS} at its own stops",
        "fix the stops",
        "Set the id with which it ends as eos_token_id in its generation_config.json (or raise max_new_tokens, if its answers are cut), and diagnose again.",
        "P",
        _lost_stops,
    ),
    Rule(
        4,
        f"the teacher would stop at less than {AGREED:.0%} of the student's right ends",
        "cold start",
        "Stop ids are merged into one event already; begin with a stage on the teacher's own answers.",
        "near P: 0.7 to 22 %",
        _unlike_stops,
    ),
    Rule(
        5,
        f"no gap, and AUROC below {AUROC}; or a weaker teacher",
        "do not",
        "There is nothing to distil. Use a stronger teacher; with a verifier, use RL (methods/grpo), or the outcome together with the teacher (methods/mimo-objective).",
        "H",
        _no_gap,
    ),
    Rule(
        6,
        f"the student's pass@8 is below {WEAK:.0%}",
        "off-policy first",
        "Its own answers hold nothing to build on: train on the teacher's answers until some are right, then on-policy.",
        "H",
        _too_weak,
    ),
    Rule(
        7,
        f"overlap@16 below {UNLIKE}; or below {OVERLAP}, or KL above {FAR}, of a teacher that is far by its tokens' mass or origin",
        "cold start",
        COLD,
        "near P; calibrated",
        _apart,
    ),
    Rule(
        8,
        f"excess KL below {EXCESS:.0%} (not known: answers below {SHORT} tokens), and taking over gains nothing",
        "sft",
        "On-policy training gains nothing here: SFT on the teacher's samples is cheaper.",
        "H; calibrated",
        _short_horizon,
    ),
    Rule(9, "otherwise", "opd", "On-policy distillation.", "P", _otherwise),
)
REFINEMENTS = (
    Refinement(
        10,
        f"take-over below {TAKEOVER} beyond depth L",
        "Cap rollouts at L tokens: after them the teacher's signal is noise.",
        "near P: +0.37 to +0.02",
        _noise,
    ),
    Refinement(
        11,
        "a verifier, and a target above the teacher",
        "OPD first, then RL in a separate stage, not their sum.",
        "P: 80.6 against 62.8",
        _beyond,
    ),
    Refinement(
        12,
        "several teachers",
        "The best model is not always the best teacher: take the one with the strongest signal on the student's answers.",
        "P",
        _ranked,
    ),
)


# The recommendation: which teacher scores which domain, the order of training, and the recipe. No torch here.


ROOM = 1.25  # relative to the longest answer seen
NEAR = 0.9  # the teacher's probability on the student's likeliest tokens that sampling can find
FIRST = 0.25  # share of the steps before the student answers itself
FIXED_FIRST = ("fix the stops",)  # to be done before any recipe
ORDER: tuple[Verdict, ...] = (
    "fix the stops",
    "fix the template",
    "span view",
    "off-policy first",
    "cold start",
    "opd",
    "sft",
    "do not",
)


@dataclass(frozen=True)
class Advice:
    """The advice for one domain: its best teacher, and the decision."""

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
    """Rank teachers, best first: by signal on the student's answers; if not known, by AUROC, then by distance."""

    def worth(pair: PairMeasures) -> tuple[float, ...]:
        signal = -math.inf if pair.signal is None else pair.signal
        return signal, pair.auroc or 0.0, -(pair.kl or 0.0)

    return sorted(pairs, key=worth, reverse=True)


@dataclass(frozen=True)
class Recommendation:
    """The whole recommendation. `settings`: the recommended recipe; None: no recipe would help."""

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
    """`sources`: number of a source -> its domains; `longest`: tokens of an answer; `given`: the recipe has its own training settings."""
    useful = [one for one in advice if one.verdict != "do not"]
    left_out = {one.domain: one.decision.because for one in advice if one.verdict == "do not"}
    kept = {one.domain for one in useful}
    for at, domains in sources.items():  # a recipe takes whole sources
        for domain in left_out.keys() & domains if domains & kept else ():
            left_out[domain] += (
                f"; its rows share a source with others, {spec.prompts[at].source!r}: remove them from it first"
            )
    verdicts: list[Verdict] = [one.verdict for one in useful]
    verdict: Verdict = min(verdicts, key=ORDER.index) if verdicts else "do not"
    teachers = {one.domain: one.pair.teacher for one in useful}
    reasons = [f"{one.domain}: {one.pair.teacher}: {one.verdict}: {one.decision.because}" for one in advice]
    if not useful or verdict in FIXED_FIRST:
        return Recommendation(verdict, teachers, left_out, reasons)
    settings = _base(spec, useful, sources)
    reasons += _objective(settings, spec, useful, given)
    reasons += _lengths(settings, spec, useful, longest, given)
    if stages := _stages(spec, useful):
        settings["stages"] = stages
    try:
        load_recipe(settings)
    except RecipeError as error:  # it conflicts with another part of the user's recipe
        reasons.append(f"no recipe, because the given one has to be changed by hand first: {error}")
        return Recommendation(verdict, teachers, left_out, reasons)
    return Recommendation(verdict, teachers, left_out, reasons, settings)


def _base(spec: Stage, useful: Sequence[Advice], sources: Mapping[int, set[str]]) -> dict[str, Any]:
    """The given stage with the recommended teachers and prompts."""
    settings: dict[str, Any] = spec.model_dump(mode="json", exclude_defaults=True)
    settings.pop("name", None)
    if spec.monitors == Monitors().completed():
        settings.pop("monitors", None)  # the defaults
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
    elif any(one.verdict == "fix the template" and _better_with_own_template(one.pair) for one in advice):
        view = kind.view.model_dump(mode="json", exclude_defaults=True)
        found["view"] = {**view, "kind": kind.view.name, "chat_template": "teacher"}
    return found


def _better_with_own_template(pair: PairMeasures) -> bool:
    """Whether a teacher is better with its own template. Without a measurement its own is preferred."""
    known = pair.answers is not None and pair.answers.accuracy is not None and pair.own_template is not None
    return not known or pair.own_template > pair.answers.accuracy  # type: ignore[operator, union-attr]


def _objective(settings: dict[str, Any], spec: Stage, useful: Sequence[Advice], given: bool) -> list[str]:
    """An objective that the teachers support. A recipe's own is kept if possible."""
    if any(one.verdict == "span view" for one in useful):
        settings["objective"] = {"form": "gold"}
        return ["objective: spans of two tokenizers (gold)"]
    if given:
        return []
    if any("hidden" not in spec.teachers[one.pair.teacher].offers for one in useful):
        settings["objective"] = {"form": "policy_gradient"}
        return ["objective: policy gradient, because a teacher only gives log-probs of sampled tokens"]
    masses = [one.pair.overlap_mass for one in useful if one.pair.overlap_mass is not None]
    if masses and min(masses) < NEAR:
        settings["objective"] = {"form": "direct", "divergence": "jsd", "beta": 0.5}
        return [
            f"objective: JSD, because {1 - min(masses):.0%} of a teacher's probability is on tokens that the student hardly ever samples"
        ]
    settings["objective"] = {"form": "direct", "divergence": "reverse_kl"}
    return ["objective: exact reverse KL over the whole vocabulary"]


def _lengths(settings: dict[str, Any], spec: Stage, useful: Sequence[Advice], longest: int, given: bool) -> list[str]:
    rollout = dict(settings.get("rollout", {}))
    if all(one.refined(10) for one in useful):
        cap = max(useful_depth(one.pair.takeover) or 0 for one in useful)
        settings["rollout"] = {**rollout, "max_new_tokens": cap}
        return [f"rollouts of at most {cap} tokens: after them the teacher's signal is noise"]
    if given:
        return []
    wanted = min(spec.rollout.max_new_tokens, SHORT * math.ceil(ROOM * longest / SHORT))
    settings["rollout"] = {**rollout, "max_new_tokens": wanted}
    return [f"rollouts of at most {wanted} tokens: the longest answer of either model had {longest}"]


def _stages(spec: Stage, useful: Sequence[Advice]) -> list[dict[str, Any]]:
    """The stages, if there are several or the one differs from the given; none: the given one is right."""
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
