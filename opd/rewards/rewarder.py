"""Chooses the reward of each sample; weighted sums, a cache by content, counters, and reports of the first failures."""

from __future__ import annotations

import math
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache

from opd.common.chat_client import CallLog
from opd.common.errors import RecipeError
from opd.common.http import nothing
from opd.common.text import plain
from opd.records import Prompt, RewardResult, Sample
from opd.rewards.reward import DEFAULT, OpenReward, RewardKind, Rewards, Verifier, reward_of
from opd.rewards.workers import Pool, Request, RewardJob, content, pool, write_request

CACHED = 65_536  # results kept in the cache
REPORTED = 3  # failures of each reward that are reported; all are counted
OWN_VERIFIER = (Verifier(),)
FIELD_ERRORS = (ValueError, TypeError, RecursionError, OverflowError)  # from a prompt's fields; the text is plain text


class Rewarder:
    """The rewards of a stage: samples in, results out. Domains without an entry use the prompt's own verifier.

    `drain()` gives counts since the last call: rewards `given` to samples, checks that `failed` (of those `timed_out`), and cache
    hits. `say` receives the first failures of each reward, with the prompt and the reason.
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
                f"`{DEFAULT}` applies to all others."
            )
        self.say, self._sandbox, self._rewards = say, rewards.sandbox, rewards.domains
        given = [kind for kinds in rewards.domains.values() for kind in kinds]
        for kind in given:
            kind.require(self._sandbox)
        functions = {name: function for kind in given for name, function in kind.functions.items()}
        self._forks = Pool("fork", functions=functions)
        self._kept: dict[tuple[str, str], Pool] = {}  # of rewards with `keeps_process`, by sandbox and label
        self._end = weakref.finalize(self, _close, self._forks, self._kept)
        self._calls: CallLog | None = None  # of rewards with `asks_elsewhere`
        self._check: Callable[[], None] = nothing
        self._opened: dict[bytes, OpenReward] = {}  # by settings
        self._cache: OrderedDict[bytes, RewardResult] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        self.last_failure = "no answer could be rewarded"

    def kinds(self, prompt: Prompt) -> Sequence[RewardKind]:
        """The rewards of a prompt's answers, as in the recipe."""
        return self._rewards.get(prompt.domain) or self._rewards.get(DEFAULT) or OWN_VERIFIER

    def covers(self, prompt: Prompt) -> bool:
        """Whether answers to this prompt can be rewarded."""
        return any(kind.covers(prompt) for kind in self.kinds(prompt))

    def require(self, prompts: Sequence[Prompt]) -> None:
        """Raises if something that the prompts' own verifiers need is missing."""
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

    def remember(self, calls: CallLog, check: Callable[[], None]) -> None:
        """Network calls of rewards are looked up and logged in `calls`; `check` is called while waiting for them."""
        self._calls, self._check = calls, check
        self._close_opened()

    def close(self) -> None:
        """Ends the workers that only this rewarder uses."""
        self._end()
        self._close_opened()

    def _close_opened(self) -> None:
        for opened in self._opened.values():
            opened.close()
        self._opened.clear()

    def drain(self) -> dict[str, float]:
        counts: dict[str, float] = {name: self._counts[name] for name in ("given", "failed", "timed_out", "cached")}
        self._counts.clear()
        for opened in self._opened.values():
            for name, count in opened.drain().items():
                counts[name] = counts.get(name, 0) + count
        return counts

    def each(self, parts: Sequence[tuple[RewardKind, Sample]]) -> list[RewardResult]:
        """The result of each reward on its sample, unweighted."""
        found: dict[int, RewardResult] = {}
        over_network: list[int] = []
        by_workers: dict[int, RewardKind] = {}
        for number, (kind, sample) in enumerate(parts):
            if kind.asks_elsewhere:
                over_network.append(number)
                continue
            chosen = kind.chosen(sample.prompt.fields)
            if isinstance(chosen, str):
                found[number] = RewardResult(None, error=chosen)
            elif chosen.in_process:
                try:
                    found[number] = reward_of(chosen, sample)
                except FIELD_ERRORS as error:
                    found[number] = _unusable(error)
            else:
                by_workers[number] = chosen.within(self._sandbox)
        if over_network:
            found |= self._over_network(parts, over_network)
        if by_workers:
            found |= self._by_workers(parts, by_workers)
        results = [found[number] for number in range(len(parts))]
        for (kind, sample), result in zip(parts, results, strict=True):
            if result.reward is None:
                self._report(kind, sample, result)
        return results

    def _over_network(
        self, parts: Sequence[tuple[RewardKind, Sample]], numbers: Sequence[int]
    ) -> dict[int, RewardResult]:
        """Results of rewards with `asks_elsewhere`, by number. Each kind gets all its samples at once, without cached ones."""
        found: dict[int, RewardResult] = {}
        waiting: dict[bytes, dict[bytes, list[int]]] = {}  # settings -> content -> numbers
        for number in numbers:
            kind, sample = parts[number]
            key = content(kind, sample)
            if key in self._cache:
                found[number] = self._cache[key]
                self._counts["cached"] += 1
            else:
                waiting.setdefault(kind.model_dump_json().encode(), {}).setdefault(key, []).append(number)
        for settings, by_content in waiting.items():
            kind = parts[next(iter(by_content.values()))[0]][0]
            if settings not in self._opened:
                self._opened[settings] = kind.open(self._calls, self._check)
            results = self._opened[settings].reward([parts[same[0]][1] for same in by_content.values()])
            for (key, same), result in zip(by_content.items(), results, strict=True):
                found |= dict.fromkeys(same, result)
                self._counts["cached"] += len(same) - 1
                if result.reward is not None:
                    self._remember(key, result)
        return found

    def _by_workers(
        self, parts: Sequence[tuple[RewardKind, Sample]], chosen: Mapping[int, RewardKind]
    ) -> dict[int, RewardResult]:
        """Results of the chosen rewards, by number. Equal requests are sent once."""
        found: dict[int, RewardResult] = {}
        sent: dict[bytes, RewardJob] = {}
        waiting: dict[int, bytes] = {}  # number -> cache key
        queues: dict[Pool, list[RewardJob]] = {}
        for number, kind in chosen.items():
            named, sample = parts[number]
            try:
                request = Request(named, self._sandbox, sample, kind.limit(sample))
                job = RewardJob(write_request(request), kind.bounds, request.limit, own_time=kind.forks)
                key = content(kind, sample)
            except FIELD_ERRORS as error:
                found[number] = _unusable(error)
                continue
            if key in self._cache or key in sent:
                self._counts["cached"] += 1
            else:
                sent[key] = job
                queues.setdefault(self._pool(kind), []).append(job)
            if key in self._cache:
                found[number] = self._cache[key]
            else:
                waiting[number] = key
        for workers, jobs in queues.items():
            workers.run(jobs)
        for number, key in waiting.items():
            reply = sent[key].reply
            found[number] = RewardResult(None, error="no worker replied") if reply is None else reply.result
        for key, job in sent.items():
            if (reply := job.reply) is not None:
                self._counts["timed_out"] += reply.timed_out
                if reply.result.reward is not None or reply.lasting:  # other failures may be the machine's fault
                    self._remember(key, reply.result)
        return found

    def _pool(self, kind: RewardKind) -> Pool:
        """The pool that runs a reward. Rewards with `keeps_process` get their own, which ends with the stage."""
        if kind.forks or not kind.sees_prompt:
            return self._forks if kind.in_fork else pool(kind.worker_sandbox(self._sandbox))
        key = "fork" if kind.in_fork else kind.worker_sandbox(self._sandbox), kind.label
        if key not in self._kept:
            self._kept[key] = Pool(key[0], size=1, functions=self._forks.functions)
        return self._kept[key]

    def _remember(self, key: bytes, result: RewardResult) -> None:
        self._cache[key] = result
        while len(self._cache) > CACHED:
            self._cache.popitem(last=False)

    def _report(self, kind: RewardKind, sample: Sample, result: RewardResult) -> None:
        """Count a failure, and report the first ones of each reward."""
        self._counts["failed"] += 1
        name, self.last_failure = kind.label, plain(result.error)
        if self.say is None or self._reported[name] == REPORTED:
            return
        self._reported[name] += 1
        line = f"reward {name}: none for an answer to {sample.prompt.id}: {result.error}"
        self.say(plain(line) + (" (further failures are only counted)" if self._reported[name] == REPORTED else ""))


def _unusable(error: Exception) -> RewardResult:
    return RewardResult(None, error=f"the prompt's fields cannot be used: {type(error).__name__}: {error}")


def _close(forks: Pool, kept: Mapping[tuple[str, str], Pool]) -> None:
    for workers in (forks, *kept.values()):
        workers.close()


def _sum(parts: Sequence[tuple[float, RewardResult]]) -> RewardResult:
    """The weighted sum. If one part has no reward, neither has the sum."""
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
    """Rewards samples with the prompts' own verifiers."""
    return _own_verifiers()(samples)


@cache
def _own_verifiers() -> Rewarder:
    return Rewarder()


# --- Trying rewards on a few prompts before sampling starts ---


TRIED = 4  # prompts per domain on which every reward is tried
PLACEHOLDER = "0"


def check_rewards(
    rewards: Rewards,
    prompts: Sequence[Prompt],
    *,
    domains: Collection[str] | None = None,
    say: Callable[[str], None] | None = None,
) -> Rewarder:
    """The rewarder of a stage, after trying each of its rewards on answers to prompts of each domain.

    Raises if files, functions, packages or the sandbox are missing, or if a function does not take one sample and return a number
    in range; the error includes the reward's message. Some prompts of a domain may be impossible to reward, but not all.
    """
    rewarder = Rewarder(rewards, domains or list(dict.fromkeys(prompt.domain for prompt in prompts)))
    rewarder.require(prompts)
    tried: dict[tuple[str, int], list[tuple[RewardKind, Sample]]] = {}
    for prompt in prompts:
        if rewarder.covers(prompt):
            for number, kind in enumerate(rewarder.kinds(prompt)):
                tried.setdefault((prompt.domain, number), []).append((kind, Sample(prompt, likely_answer(prompt))))
    for (domain, _), parts in tried.items():
        tried_on = 1 if parts[0][0].asks_elsewhere else TRIED  # calls may cost money
        some = parts[:: max(1, len(parts) // tried_on)][:tried_on]
        found = rewarder.each(some)
        if all(result.reward is None for result in found):
            kind, sample = some[0]
            raise RecipeError(
                f"rewards: {kind.label} gives no reward in domain {plain(domain)!r}, tried on {len(some)} prompts. "
                f"The first, {plain(sample.prompt.id)}: {plain(found[0].error)}. Fix the reward or the prompts' fields."
            )
    rewarder.drain()
    rewarder.say = say  # set only now: problems here are reported once, by the error
    return rewarder


def reward_warnings(rewarder: Rewarder, prompts: Sequence[Prompt]) -> list[str]:
    """Warnings, one per domain, if the prompts suggest that every answer will be counted as wrong."""
    found: dict[str, list[tuple[str, str]]] = {}
    for prompt in prompts:
        for kind in rewarder.kinds(prompt) if rewarder.covers(prompt) else ():
            chosen = kind.chosen(prompt.fields)
            if not isinstance(chosen, str):
                found.setdefault(prompt.domain, []).append((chosen.label, chosen.doubt(prompt)))
    return [
        f"WARNING: rewards: {reasons[0][0]} in domain {plain(domain)!r}: {plain(reasons[0][1])}"
        for domain, reasons in found.items()
        if all(reason for _, reason in reasons)
    ]


def likely_answer(prompt: Prompt) -> str:
    """A likely good answer: the dataset's completion, or the reference."""
    entry = prompt.fields.get("entry")
    known = [
        prompt.fields.get("completion"),
        prompt.fields.get("answer"),
        entry.get("answer") if isinstance(entry, dict) else None,
    ]
    return next((text for text in known if isinstance(text, str) and text), PLACEHOLDER)
