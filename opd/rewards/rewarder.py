"""Which reward a sample gets; sums, a cache by content, counters, and the first failures in words."""

from __future__ import annotations

import math
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache

from opd.errors import RecipeError
from opd.rewards.callables import callables
from opd.rewards.pool import Errand, Pool, pool
from opd.rewards.protocol import Request, content, write_request
from opd.rewards.reward import RewardKind, give
from opd.rewards.settings import DEFAULT, Rewards
from opd.rewards.verifier import Verifier
from opd.text import plain
from opd.types import Prompt, RewardResult, Sample

CACHED = 65_536  # results remembered
SAID = 3  # failures of each reward that are told in words; all are counted
OWN_VERIFIER = (Verifier(),)


class Rewarder:
    """The rewards of a stage: samples in, results out. In domains without an entry the prompt's own verifier rewards.

    `drain()` gives what happened since it was last called: rewards `given` to samples, checks that `failed` (of those
    `timed_out`), and results taken from the cache. `say` gets the first failures of each reward, with the prompt and the reason.
    """

    def __init__(
        self,
        rewards: Rewards | None = None,
        domains: Collection[str] | None = None,
        *,
        say: Callable[[str], None] | None = None,
    ) -> None:
        rewards = rewards or Rewards()
        unknown = [domain for domain in rewards.domains if domains is not None and domain not in (DEFAULT, *domains)]
        if unknown:
            raise RecipeError(
                f"rewards.{unknown[0]}: no prompt has this domain; they have {', '.join(domains or ())}. "
                f"`{DEFAULT}` stands for the others."
            )
        self.say, self._sandbox, self._rewards = say, rewards.sandbox, rewards.domains
        for kind in (kind for kinds in rewards.domains.values() for kind in kinds):
            kind.require(self._sandbox)
        self._forks = Pool("fork", functions={kind.function: kind.given for kind in callables(rewards)})
        self._end = weakref.finalize(self, self._forks.close)
        self._cache: OrderedDict[bytes, RewardResult] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._said: Counter[str] = Counter()
        self.last_failure = "no answer could be rewarded"

    def kinds(self, prompt: Prompt) -> Sequence[RewardKind]:
        """The rewards that answers to a prompt get, as the recipe has them."""
        return self._rewards.get(prompt.domain) or self._rewards.get(DEFAULT) or OWN_VERIFIER

    def covers(self, prompt: Prompt) -> bool:
        """Is there anything to reward this prompt's answers by?"""
        return any(kind.covers(prompt) for kind in self.kinds(prompt))

    def require(self, prompts: Sequence[Prompt]) -> None:
        """What the prompts' own verifiers need is here too, or the error says what is missing."""
        for prompt in prompts:
            for kind in self.kinds(prompt):
                chosen = kind.chosen(prompt.fields)
                if not isinstance(chosen, str):
                    chosen.require(self._sandbox)

    def __call__(self, samples: Sequence[Sample]) -> list[RewardResult]:
        parts = [(kind, sample) for sample in samples for kind in self.kinds(sample.prompt)]
        found = iter(self.each(parts))
        results = [_sum([(kind.weight, next(found)) for kind in self.kinds(sample.prompt)]) for sample in samples]
        self._counts["given"] += sum(result.reward is not None for result in results)
        return results

    def close(self) -> None:
        """End the workers that are nobody else's."""
        self._end()

    def drain(self) -> dict[str, int]:
        counts = {name: self._counts[name] for name in ("given", "failed", "timed_out", "cached")}
        self._counts.clear()
        return counts

    def each(self, parts: Sequence[tuple[RewardKind, Sample]]) -> list[RewardResult]:
        """Each reward on its sample, unweighted."""
        found: list[RewardResult | None] = []
        asked: dict[bytes, Errand] = {}
        places: dict[int, bytes] = {}
        queues: dict[Pool, list[Errand]] = {}
        for kind, sample in parts:
            ready = self._at_hand(kind, sample)
            if isinstance(ready, RewardResult):
                found.append(ready)
                continue
            chosen, key, errand = ready
            if key in self._cache or key in asked:
                self._counts["cached"] += 1
            else:
                asked[key] = errand
                queues.setdefault(self._pool(chosen), []).append(errand)
            places[len(found)] = key
            found.append(self._cache.get(key))
        for workers, errands in queues.items():
            workers.run(errands)
        for number, key in places.items():
            if key in asked and (reply := asked[key].reply) is not None:
                found[number] = reply.result
        self._remember(asked)
        whole = [result or RewardResult(None, error="no worker replied") for result in found]
        self._counts["timed_out"] += sum(
            errand.reply is not None and errand.reply.timed_out for errand in asked.values()
        )
        self._report(parts, whole)
        return whole

    def _at_hand(self, kind: RewardKind, sample: Sample) -> RewardResult | tuple[RewardKind, bytes, Errand]:
        """The result, where it takes no process of its own; else the reward chosen, its key in the cache, and what to send."""
        chosen = kind.chosen(sample.prompt.fields)
        if isinstance(chosen, str):
            return RewardResult(None, error=chosen)
        chosen = chosen.within(self._sandbox)
        try:
            if chosen.in_process:
                return give(chosen, sample)
            request = Request(kind, self._sandbox, sample, chosen.limit(sample))
            errand = Errand(write_request(request), chosen.bounds, request.limit, own_time=chosen.forks)
            return chosen, content(chosen, sample), errand
        except (ValueError, TypeError, RecursionError, OverflowError) as error:  # of fields: the text is only text
            return RewardResult(None, error=f"the prompt's fields cannot be used: {type(error).__name__}: {error}")

    def _pool(self, kind: RewardKind) -> Pool:
        """Where it runs. One that keeps its process shares it with no other."""
        if kind.in_fork:
            return self._forks
        keeps = kind.sees_prompt and not kind.forks
        return pool(kind.walls(self._sandbox), kind.label if keeps else "")

    def _remember(self, asked: Mapping[bytes, Errand]) -> None:
        """Rewards, and answers that brought theirs down. Other failures may have been the machine's."""
        for key, errand in asked.items():
            if errand.reply is not None and (errand.reply.result.reward is not None or errand.reply.lasting):
                self._cache[key] = errand.reply.result
        while len(self._cache) > CACHED:
            self._cache.popitem(last=False)

    def _report(self, parts: Sequence[tuple[RewardKind, Sample]], results: Sequence[RewardResult]) -> None:
        for (kind, sample), result in zip(parts, results, strict=True):
            if result.reward is not None:
                continue
            self._counts["failed"] += 1
            name, self.last_failure = kind.label, plain(result.error)
            if self.say is None or self._said[name] == SAID:
                continue
            self._said[name] += 1
            line = f"reward {name}: none for an answer to {sample.prompt.id}: {result.error}"
            self.say(plain(line) + (" (further failures are counted only)" if self._said[name] == SAID else ""))


def _sum(parts: Sequence[tuple[float, RewardResult]]) -> RewardResult:
    """Weighted. If one part could not be given, neither can the whole."""
    full = min(1.0, math.fsum(weight for weight, _ in parts if weight > 0)) or 1.0
    if len(parts) == 1 and parts[0][0] == 1.0:
        return parts[0][1]
    failed = [result for _, result in parts if result.reward is None]
    if failed:
        by_answer = all(result.by_answer for result in failed)
        return RewardResult(None, error="; ".join(result.error for result in failed), by_answer=by_answer)
    reward = math.fsum(weight * (result.reward or 0.0) for weight, result in parts)
    feedback = "; ".join(result.feedback for _, result in parts if result.feedback)
    return replace(RewardResult(reward, feedback=feedback), full=full)


def verify(samples: Sequence[Sample]) -> list[RewardResult]:
    """By the prompts' own verifiers alone."""
    return _own_verifiers()(samples)


@cache
def _own_verifiers() -> Rewarder:
    return Rewarder()
