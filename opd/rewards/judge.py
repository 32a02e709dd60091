"""Which reward judges which sample; sums, a cache by content, counters, and the first failures in words."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from opd import sandbox
from opd.config import Rewards, RewardSpec
from opd.config.rewards import DEFAULT
from opd.errors import RecipeError
from opd.rewards.code import test_count
from opd.rewards.pool import Task, pool
from opd.rewards.scorers import EVALUATING, IN_PROCESS, MODULES, SCORERS, forks, resolve
from opd.rewards.travel import Request, content, write_request
from opd.types import Judgement, Prompt, Sample

CACHED = 65_536  # verdicts remembered
SAID = 3  # failures of each kind of reward that are told in words; all are counted
EXTRAS = {"maths": "maths", "json": "json"}  # kind -> extra of this package that it needs
OWN_VERIFIER = (RewardSpec(),)


class Judge:
    """The rewards of a stage, as one `Reward`. Domains without an entry are judged by the prompt's own verifier.

    `drain()` gives what happened since it was last called: samples `judged`, verifications `failed` (of those `timed_out`)
    and taken from the cache. `say` gets the first failures of each kind of reward, with the prompt and the reason.
    """

    def __init__(
        self, rewards: Rewards | None = None, domains: Collection[str] | None = None, *, say: Callable[[str], None] | None = None
    ) -> None:  # fmt: skip
        rewards = rewards or Rewards()
        unknown = [domain for domain in rewards.domains if domains is not None and domain not in (DEFAULT, *domains)]
        if unknown:
            raise RecipeError(
                f"rewards.{unknown[0]}: no prompt has this domain; they have {', '.join(domains or ())}. "
                f"`{DEFAULT}` stands for the others."
            )
        self._sandbox, self._say = rewards.sandbox, say
        self._rewards = {domain: [self._ready(spec) for spec in specs] for domain, specs in rewards.domains.items()}
        self._cache: OrderedDict[bytes, Judgement] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._said: Counter[str] = Counter()
        self.last_failure = "no answer could be judged"

    def rewards(self, prompt: Prompt) -> Sequence[RewardSpec]:
        return self._rewards.get(prompt.domain) or self._rewards.get(DEFAULT) or OWN_VERIFIER

    def judges(self, prompt: Prompt) -> bool:
        """Is there anything to judge this prompt's answers by?"""
        return any(spec.kind != "verifier" or "verifier" in prompt.fields for spec in self.rewards(prompt))

    def require(self, prompts: Sequence[Prompt]) -> None:
        """What the prompts' own verifiers need is here too, or the error says what is missing."""
        for prompt in prompts:
            for spec in self.rewards(prompt):
                chosen = resolve(spec, prompt.fields)
                if not isinstance(chosen, str):
                    self._needs(*chosen)

    def __call__(self, samples: Sequence[Sample]) -> list[Judgement]:
        parts = [(spec, sample) for sample in samples for spec in self.rewards(sample.prompt)]
        found = iter(self.parts(parts))
        judgements = []
        for sample in samples:
            specs = self.rewards(sample.prompt)
            judgements.append(_sum([(spec.weight, next(found)) for spec in specs]))
        self._counts["judged"] += sum(judgement.score is not None for judgement in judgements)
        return judgements

    def drain(self) -> dict[str, int]:
        counts = {name: self._counts[name] for name in ("judged", "failed", "timed_out", "cached")}
        self._counts.clear()
        return counts

    def parts(self, parts: Sequence[tuple[RewardSpec, Sample]]) -> list[Judgement]:
        """Each reward on its sample, unweighted."""
        found: list[Judgement | None] = []
        asked: dict[bytes, Task] = {}
        places: dict[int, bytes] = {}
        queues: dict[tuple[str, str], list[Task]] = {}
        for spec, sample in parts:
            chosen = self._at_hand(spec, sample)
            if isinstance(chosen, Judgement):
                found.append(chosen)
                continue
            request, message = chosen
            key = content(request)
            if key in self._cache or key in asked:
                self._counts["cached"] += 1
            else:
                fresh = forks(request.name, request.spec)
                asked[key] = Task(message, request.name, request.limit, own_time=fresh)
                place = (self._walls(request.name), "" if fresh else request.spec.function or "")
                queues.setdefault(place, []).append(asked[key])
            places[len(found)] = key
            found.append(self._cache.get(key))
        for place, tasks in queues.items():
            pool(*place).run(tasks)
        for number, key in places.items():
            if key in asked and (reply := asked[key].reply) is not None:
                found[number] = reply.judgement
        self._remember(asked)
        whole = [judgement or Judgement(None, error="not judged") for judgement in found]
        self._counts["timed_out"] += sum(task.reply is not None and task.reply.timed_out for task in asked.values())
        self._report(parts, whole)
        return whole

    def _at_hand(self, spec: RewardSpec, sample: Sample) -> Judgement | tuple[Request, bytes]:
        """The judgement, where it takes no process of its own; else what to send to one."""
        chosen = resolve(spec, sample.prompt.fields)
        if isinstance(chosen, str):
            return Judgement(None, error=chosen)
        name, own = chosen
        if name == "code" and own.sandbox == "auto":
            own = own.model_copy(update={"sandbox": self._sandbox})
        try:
            if name in IN_PROCESS:
                return SCORERS[name](own, sample)
            request = Request(name, own, sample, _limit(name, own, sample))
            return request, write_request(request)
        except (ValueError, TypeError, RecursionError, OverflowError) as error:  # of fields: the text is only text
            return Judgement(None, error=f"the prompt's fields cannot be used: {type(error).__name__}: {error}")

    def _remember(self, asked: Mapping[bytes, Task]) -> None:
        """Verdicts, and answers that brought their scorer down. Other failures may have been the machine's."""
        for key, task in asked.items():
            if task.reply is not None and (task.reply.judgement.score is not None or task.reply.lasting):
                self._cache[key] = task.reply.judgement
        while len(self._cache) > CACHED:
            self._cache.popitem(last=False)

    def _report(self, parts: Sequence[tuple[RewardSpec, Sample]], found: Sequence[Judgement]) -> None:
        for (spec, sample), judgement in zip(parts, found, strict=True):
            if judgement.score is not None:
                continue
            self._counts["failed"] += 1
            name, self.last_failure = spec.function or spec.kind, printable(judgement.error)
            self._said[name] += 1
            if self._say is not None and self._said[name] <= SAID:
                line = f"reward {name}: no score for an answer to {sample.prompt.id}: {judgement.error}"
                self._say(
                    printable(line) + (" (further failures are counted only)" if self._said[name] == SAID else "")
                )

    # What rewards need

    def _ready(self, spec: RewardSpec) -> RewardSpec:
        """Everything the reward needs is here, or the error says what is missing: now, not at step 400."""
        if spec.kind == "custom":
            module = (spec.function or "").rpartition(":")[0]
            if module.endswith(".py") and not Path(module).is_file():
                raise RecipeError(f"rewards: function {spec.function!r}: there is no file {module}.")
            if not module.endswith(".py") and not _importable(module):
                raise RecipeError(
                    f"rewards: function {spec.function!r}: there is no module {module!r} on the Python path. "
                    "Write file.py:function, with the path of the file relative to the recipe."
                )
        self._needs(spec.kind, spec)
        return spec

    def _needs(self, name: str, spec: RewardSpec) -> None:
        if name in MODULES and not _importable(MODULES[name]):
            how = f"pip install 'opd[{EXTRAS[name]}]'" if name in EXTRAS else f"pip install {MODULES[name]}"
            raise RecipeError(f"rewards: kind {name} needs the {MODULES[name]} package: {how}.")
        if name == "code":
            _chosen(spec.sandbox if spec.sandbox != "auto" else self._sandbox)
        elif name in EVALUATING:
            self._walls(name)

    def _walls(self, name: str) -> str:
        return _chosen(self._sandbox) if name in EVALUATING else "none"


@cache
def _chosen(wanted: str) -> str:
    return sandbox.choose(wanted)


def _limit(name: str, spec: RewardSpec, sample: Sample) -> float:
    """Seconds for one sample. Programs have their own limit in the sandbox: there, this one is the second net."""
    if name != "code":
        return spec.time_limit
    return spec.time_limit * test_count(sample.prompt.fields) + sandbox.START


def _sum(parts: Sequence[tuple[float, Judgement]]) -> Judgement:
    """Weighted. If one part could not be judged, neither can the whole."""
    full = min(1.0, math.fsum(weight for weight, _ in parts if weight > 0)) or 1.0
    if len(parts) == 1 and parts[0][0] == 1.0:
        return parts[0][1]
    failed = [judgement for _, judgement in parts if judgement.score is None]
    if failed:
        by_answer = all(judgement.by_answer for judgement in failed)
        return Judgement(None, error="; ".join(judgement.error for judgement in failed), by_answer=by_answer)
    score = math.fsum(weight * (judgement.score or 0.0) for weight, judgement in parts)
    feedback = "; ".join(judgement.feedback for _, judgement in parts if judgement.feedback)
    return replace(Judgement(score, feedback=feedback), full=full)


def _importable(module: str) -> bool:
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def printable(text: str) -> str:
    """One line without control characters: reasons quote what models wrote."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def verify(samples: Sequence[Sample]) -> list[Judgement]:
    """By the prompts' own verifiers alone."""
    return _own_verifiers()(samples)


@cache
def _own_verifiers() -> Judge:
    return Judge()
