"""Every choice a recipe can make, by family and name. Strings, so that nothing is imported before it is asked for.

A new choice is a class (see `opd.settings.Choice`) and a line here; one of your own is added by `register`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from opd.settings import Choice

CHOICES: dict[str, str] = {
    "form.direct": "opd.objective.direct:Direct",
    "form.policy_gradient": "opd.objective.policy_gradient:PolicyGradient",
    "form.uld": "opd.objective.crossed:ULD",
    "form.gold": "opd.objective.crossed:GOLD",
    "form.k2": "opd.objective.sampled:K2",
    "form.cross_entropy": "opd.objective.sampled:CrossEntropy",
    "form.pairwise": "opd.objective.pairwise:Pairwise",
    "divergence.reverse_kl": "opd.divergences.kinds:ReverseKL",
    "divergence.forward_kl": "opd.divergences.kinds:ForwardKL",
    "divergence.jsd": "opd.divergences.kinds:JSD",
    "divergence.skew_kl": "opd.divergences.kinds:SkewKL",
    "divergence.skew_reverse_kl": "opd.divergences.kinds:SkewReverseKL",
    "divergence.alpha": "opd.divergences.kinds:Alpha",
    "divergence.tvd": "opd.divergences.kinds:TVD",
    "divergence.hellinger": "opd.divergences.kinds:Hellinger",
    "divergence.acceptance": "opd.divergences.kinds:Acceptance",
    "support.full": "opd.divergences.kinds:Full",
    "support.topk": "opd.divergences.kinds:TopIds",
    "advantage.outcome": "opd.objective.advantages:OutcomeAdvantage",
    "advantage.teacher": "opd.objective.advantages:TeacherAdvantage",
    "advantage.reference": "opd.objective.advantages:ReferenceAdvantage",
    "advantage.magnitude": "opd.objective.magnitude:MagnitudeAdvantage",
    "surrogate.importance_sampling": "opd.objective.surrogates:ImportanceSampling",
    "surrogate.ppo": "opd.objective.surrogates:PPO",
    "surrogate.cispo": "opd.objective.surrogates:CISPO",
    "surrogate.gspo": "opd.objective.surrogates:GSPO",
    "preference.dpo": "opd.objective.pairwise:DPO",
    "preference.ipo": "opd.objective.pairwise:IPO",
    "preference.orpo": "opd.objective.pairwise:ORPO",
    "correction.icepop": "opd.objective.corrections:IcePop",
    "correction.tis": "opd.objective.corrections:TIS",
    "correction.mis": "opd.objective.corrections:MIS",
    "correction.prefix": "opd.objective.corrections:Prefix",
    "correction.none": "opd.objective.corrections:VetoOnly",
    "writer.student": "opd.sampling.writers:StudentWriter",
    "writer.mixed": "opd.sampling.writers:MixedWriter",
    "writer.teacher": "opd.sampling.writers:TeacherWriter",
    "writer.shown": "opd.sampling.writers:ShownWriter",
    "writer.data": "opd.sampling.writers:DataWriter",
    "teacher.cached": "opd.teachers.cached:CachedTeacher",
    "teacher.frozen": "opd.teachers.kinds:FrozenTeacher",
    "teacher.adapter": "opd.teachers.adapter:AdapterTeacher",
    "teacher.self": "opd.teachers.of_student:SelfTeacher",
    "teacher.base": "opd.teachers.of_student:BaseTeacher",
    "teacher.ema": "opd.teachers.of_student:EmaTeacher",
    "teacher.refresh": "opd.teachers.of_student:RefreshTeacher",
    "teacher.live": "opd.teachers.of_student:LiveTeacher",
    "teacher.served": "opd.teachers.served:ServedTeacher",
    "teacher.mixture": "opd.teachers.mixture:MixtureTeacher",
    "teacher.extrapolation": "opd.teachers.mixture:ExtrapolationTeacher",
    "teacher.vllm": "opd.teachers.vllm:VllmTeacher",
    "teacher.sglang": "opd.teachers.vllm:SglangTeacher",
    "teacher.openai": "opd.teachers.vllm:OpenAITeacher",
    "view.same": "opd.teachers.views:SameView",
    "view.instruction": "opd.teachers.views:InstructionView",
    "view.template": "opd.teachers.views:TemplateView",
    "view.context": "opd.teachers.views:ContextView",
    "view.bytes": "opd.teachers.crossing:BytesView",
    "view.sibling": "opd.teachers.group_views:SiblingView",
    "view.feedback": "opd.teachers.group_views:FeedbackView",
    "view.revision": "opd.teachers.group_views:RevisionView",
    "stop_rule.patience": "opd.objective.stopping:Patience",
    "stop_rule.target": "opd.objective.stopping:Target",
    "shares.static": "opd.data.shares:StaticShares",
    "shares.tokens": "opd.data.shares:TokenShares",
    "shares.length": "opd.data.shares:LengthShares",
    "shares.gap": "opd.data.shares:GapShares",
    "select.flat": "opd.data.selection:Flattened",
    "select.score": "opd.data.selection:ScoreBetween",
    "merge.average": "opd.models.merging:Average",
    "merge.task_arithmetic": "opd.models.merging:TaskArithmetic",
    "merge.ties": "opd.models.merging:Ties",
    "merge.stack": "opd.models.merging:Stack",
    "reward.verifier": "opd.rewards.verifier:Verifier",
    "reward.exact": "opd.rewards.texts:Exact",
    "reward.numeric": "opd.rewards.texts:Numeric",
    "reward.format": "opd.rewards.texts:Format",
    "reward.maths": "opd.rewards.maths:Maths",
    "reward.code": "opd.rewards.code:Code",
    "reward.json": "opd.rewards.texts:Json",
    "reward.chat": "opd.rewards.chat:ChatReward",
    "reward.custom": "opd.rewards.custom:Custom",
    "reward.python callable": "opd.rewards.callables:PythonCallable",
    "sampler.builtin": "opd.sampling.samplers:BuiltInSampler",
    "sampler.vllm": "opd.sampling.vllm:VllmSampler",
    "source.task": "opd.data.generators:TaskPrompts",
    "source.reasoning_gym": "opd.data.generators:GymPrompts",
    "source.run": "opd.sampling.replay:RunPrompts",
    "source.stage": "opd.sampling.replay:StagePrompts",
    "source.file": "opd.data.row_source:FilePrompts",
    "source.dataset": "opd.data.row_source:DatasetPrompts",
    "tracker.tensorboard": "opd.runner.trackers:TensorBoard",
    "tracker.wandb": "opd.runner.trackers:Wandb",
    "tracker.trackio": "opd.runner.trackers:Trackio",
    "monitor.kl": "opd.monitors.by_metrics:DivergenceJump",
    "monitor.diversity": "opd.monitors.by_metrics:LostDiversity",
    "monitor.stopping": "opd.monitors.by_length:LostStopping",
    "monitor.shortening": "opd.monitors.by_length:Shortening",
    "monitor.lengthening": "opd.monitors.by_length:Lengthening",
    "monitor.token": "opd.monitors.by_metrics:DominantToken",
    "monitor.mismatch": "opd.monitors.by_metrics:SamplerMismatch",
    "monitor.staleness": "opd.monitors.by_metrics:Stale",
    "monitor.calibration": "opd.monitors.by_metrics:Miscalibrated",
    "monitor.together": "opd.monitors.by_evaluation:FallingTogether",
    "monitor.saturation": "opd.monitors.by_evaluation:Saturation",
    "monitor.conflict": "opd.monitors.by_probe:TeachersInConflict",
    "monitor.prefix": "opd.monitors.by_probe:FlawedPrefix",
    "gate.correct": "opd.objective.reward_gates:Correct",
    "gate.wrong": "opd.objective.reward_gates:Wrong",
    "gate.all_wrong": "opd.objective.reward_gates:AllWrong",
    "gate.all_correct": "opd.objective.reward_gates:AllCorrect",
    "gate.contrast": "opd.objective.reward_gates:Contrast",
    "gate.finished": "opd.objective.gates:FinishedOnly",
    "gate.entropy": "opd.objective.gates:Entropy",
    "gate.soft_or": "opd.objective.gates:SoftOr",
    "gate.random": "opd.objective.gates:Random",
    "gate.teacher_entropy": "opd.objective.gates:TeacherEntropy",
    "gate.selectkd": "opd.objective.gates:SelectKD",
    "gate.paced": "opd.objective.reward_gates:Paced",
    "gate.perplexity": "opd.objective.gates:Perplexity",
    "gate.turns": "opd.objective.gates:Turns",
}
_registered: dict[str, type[Choice]] = {}
C = TypeVar("C", bound="type[Choice]")


def names(family: str) -> list[str]:
    every = dict.fromkeys((*CHOICES, *_registered))
    return [entry.removeprefix(f"{family}.") for entry in every if entry.startswith(f"{family}.")]


def find(family: str, name: str) -> type[Choice]:
    entry = f"{family}.{name}"
    if entry not in _registered:
        module, _, attribute = CHOICES[entry].partition(":")
        _registered[entry] = getattr(importlib.import_module(module), attribute)
    return _registered[entry]


def register(choice: C) -> C:
    """Add a choice of your own: `@opd.register` above its class. Its `family` and `name` say where it stands.

    A module may register a name again, as an edited file or a cell of a notebook does; names of others are taken.
    """
    _require_named(choice)
    entry = f"{choice.family}.{choice.name}"
    before = _registered.get(entry)
    if entry in CHOICES or (before is not None and before.__module__ != choice.__module__):
        raise ValueError(f"{choice.family} {choice.name!r} exists already: give yours another name")
    if choice.family not in {known.split(".")[0] for known in CHOICES}:
        raise ValueError(
            f"unknown family {choice.family!r}; known: {', '.join(dict.fromkeys(k.split('.')[0] for k in CHOICES))}"
        )
    _require_whole(choice)
    _registered[entry] = choice
    return choice


def _require_named(choice: type[Choice]) -> None:
    missing = [key for key in ("family", "name") if not isinstance(getattr(choice, key, None), str)]
    if missing:
        raise ValueError(
            f"{choice.__name__} has no `{missing[0]}` (a text): derive it from Gate, Term, Reward or the like, and name it"
        )


def _require_whole(choice: type[Choice]) -> None:
    """A class that could be chosen, but not used or not read again, is refused where it is written."""
    if choice.key in choice.model_fields:
        raise ValueError(
            f"{choice.family} {choice.name!r}: {choice.key!r} names the choice and cannot be a setting of it"
        )
    unwritten = sorted(choice.__abstractmethods__)
    if unwritten:
        raise ValueError(f"{choice.family} {choice.name!r} needs a method `{unwritten[0]}`")
