"""Which reward judges which sample; sums, a cache by content, and counters."""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import cache

from opd.config import RewardSpec
from opd.config.rewards import DEFAULT
from opd.errors import RecipeError
from opd.rewards import sandbox
from opd.rewards.code import test_count
from opd.rewards.pool import Task, pool
from opd.rewards.scorers import CONFINED, IN_PROCESS, SCORERS, resolve
from opd.rewards.travel import request
from opd.types import Judgement, Prompt, Sample

CACHED = 65_536  # verdicts remembered
NEEDS = {"maths": ("math_verify", "maths"), "json": ("jsonschema", "json")}  # kind -> module, extra of this package
OWN_VERIFIER = (RewardSpec(),)


class Judge:
    """The rewards of a stage, as one `Reward`. Domains without an entry are judged by the prompt's own verifier.

    `drain()` gives what happened since it was last called: samples `judged`, verifications `failed` (of those `timed_out`)
    and taken from the cache.
    """

    def __init__(
        self, rewards: Mapping[str, Sequence[RewardSpec]] | None = None, domains: Collection[str] | None = None
    ) -> None:
        unknown = [domain for domain in rewards or {} if domains is not None and domain not in (DEFAULT, *domains)]
        if unknown:
            raise RecipeError(
                f"rewards.{unknown[0]}: no prompt has this domain; they have {', '.join(domains or ())}. "
                f"`{DEFAULT}` stands for the others."
            )
        self._rewards = {domain: [_ready(spec) for spec in specs] for domain, specs in (rewards or {}).items()}
        self._cache: OrderedDict[bytes, Judgement] = OrderedDict()
        self._counts: Counter[str] = Counter()

    def rewards(self, prompt: Prompt) -> Sequence[RewardSpec]:
        return self._rewards.get(prompt.domain) or self._rewards.get(DEFAULT) or OWN_VERIFIER

    def judges(self, prompt: Prompt) -> bool:
        """Is there anything to judge this prompt's answers by?"""
        return any(spec.kind != "verifier" or "verifier" in prompt.fields for spec in self.rewards(prompt))

    def __call__(self, samples: Sequence[Sample]) -> list[Judgement]:
        parts = [(spec, sample) for sample in samples for spec in self.rewards(sample.prompt)]
        found = iter(self._score(parts))
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

    def _score(self, parts: Sequence[tuple[RewardSpec, Sample]]) -> list[Judgement]:
        found: list[Judgement | None] = []
        asked: dict[bytes, Task] = {}
        places: dict[int, bytes] = {}
        queues: dict[bool, list[Task]] = {True: [], False: []}
        for spec, sample in parts:
            chosen = resolve(spec, sample.prompt.fields)
            if isinstance(chosen, str):
                found.append(Judgement(None, error=chosen))
                continue
            name, own = chosen
            if name in IN_PROCESS:
                found.append(SCORERS[name](own, sample))
                continue
            message = request(name, own, sample)
            key = hashlib.blake2b(message, digest_size=16).digest()
            if key in self._cache or key in asked:
                self._counts["cached"] += 1
            else:
                asked[key] = Task(message, _limit(name, own, sample))
                queues[name in CONFINED].append(asked[key])
            places[len(found)] = key
            found.append(self._cache.get(key))
        for confined, tasks in queues.items():
            if tasks:
                pool(confined).run(tasks)
        for place, key in places.items():
            if key in asked:
                found[place] = asked[key].judgement
        self._remember(asked)
        whole = [judgement or Judgement(None, error="not judged") for judgement in found]
        self._counts["failed"] += sum(judgement.score is None for judgement in whole)
        self._counts["timed_out"] += sum(task.timed_out for task in asked.values())
        return whole

    def _remember(self, asked: Mapping[bytes, Task]) -> None:
        """Verdicts only: a failure may have been the machine's."""
        for key, task in asked.items():
            if task.judgement is not None and task.judgement.score is not None:
                self._cache[key] = task.judgement
        while len(self._cache) > CACHED:
            self._cache.popitem(last=False)


def _limit(name: str, spec: RewardSpec, sample: Sample) -> float:
    """Seconds until the pool steps in. Programs have their own limit in the sandbox: there, this one is the second net."""
    if name != "code":
        return spec.time_limit
    return spec.time_limit * test_count(sample.prompt.fields) + sandbox.START


def _sum(parts: Sequence[tuple[float, Judgement]]) -> Judgement:
    """Weighted. If one part could not be judged, neither can the whole."""
    if len(parts) == 1 and parts[0][0] == 1.0:
        return parts[0][1]
    errors = [judgement.error for _, judgement in parts if judgement.score is None]
    if errors:
        return Judgement(None, error="; ".join(errors))
    score = math.fsum(weight * (judgement.score or 0.0) for weight, judgement in parts)
    return Judgement(score, feedback="; ".join(judgement.feedback for _, judgement in parts if judgement.feedback))


def _ready(spec: RewardSpec) -> RewardSpec:
    """Everything the reward needs is here, or the error says what is missing: now, not at step 400."""
    if spec.kind in NEEDS:
        module, extra = NEEDS[spec.kind]
        if importlib.util.find_spec(module) is None:
            raise RecipeError(f"rewards: kind {spec.kind} needs the {module} package: pip install 'opd[{extra}]'.")
    if spec.kind == "custom":
        module = (spec.function or "").partition(":")[0]
        if not _importable(module):
            raise RecipeError(f"rewards: function {spec.function!r}: there is no module {module!r} on the Python path.")
    if spec.kind == "code":
        return spec.model_copy(update={"sandbox": sandbox.choose(spec.sandbox)})
    return spec


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def verify(samples: Sequence[Sample]) -> list[Judgement]:
    """By the prompts' own verifiers alone."""
    return _own_verifiers()(samples)


@cache
def _own_verifiers() -> Judge:
    return Judge()
