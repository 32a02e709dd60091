"""pass@1 and pass@k on held-out prompts, with standard errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opd.data.prompts import response_text
from opd.engines.requests import request_key
from opd.records import Prompt, Rewarding, RewardResult, Rollout, Sample, SampleRequest, Sampling, TokenSampler
from opd.rewards import verify
from opd.rollouts.episodes import earned_by, played_sample
from opd.rollouts.rollouter import answers

ROUNDING = 1e-9  # of weighted sums
FORMER = {"score": "reward", "unjudged": "unrewarded"}  # names in files of older runs
OnAnswers = Callable[[str, Sequence[Sample], Sequence[RewardResult]], None]
EVAL_VISIT = -1  # evaluation draws never coincide with a training visit's


@dataclass(frozen=True)
class Question:
    prompt: Prompt
    prompt_ids: np.ndarray
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # of the chat template


@dataclass(frozen=True)
class Measures:
    """One domain's result over `n` prompts; `stderr` belongs to `value`.

    An answer is right with full reward and wrong otherwise, or if it made its reward fail. Answers that could not be rewarded
    for another reason are left out of everything. If none remain, there is no value.
    """

    n: int
    greedy: float | None = None
    greedy_stderr: float | None = None
    sampled: float | None = None  # mean over prompts of the share of right samples
    sampled_stderr: float | None = None
    pass_at_k: float | None = None
    pass_at_k_stderr: float | None = None
    k: int = 0
    unrewarded: int = 0  # answers left out: no reward, through no fault of the answer
    length: float = 0.0
    truncated: float = 0.0  # share cut off at the limit; an answer that stops with its last token is not cut
    reward: float | None = None  # mean reward, partial credit included
    failed: int = 0  # answers that made their reward fail: counted as wrong
    loss: float | None = None  # nats per token of the worked answers, if measured
    loss_tokens: int = 0  # of those answers

    @property
    def value(self) -> float | None:
        """pass@1: greedy if available, else sampled."""
        return self.greedy if self.greedy is not None else self.sampled

    @property
    def stderr(self) -> float | None:
        return self.greedy_stderr if self.greedy is not None else self.sampled_stderr

    @property
    def partial(self) -> bool:
        """Whether the mean reward differs from pass@1."""
        return self.reward is not None and self.value is not None and abs(self.reward - self.value) > 1e-9

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if value is not None}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Measures:
        return cls(**{FORMER.get(key, key): value for key, value in found.items()})


def evaluate(
    sampler: TokenSampler, questions: Mapping[str, Sequence[Question]], sampling: Sampling, tokenizer: Any, *,
    greedy: bool, k: int, temperature: float, seed: int, check_stop: Callable[[], None] = lambda: None,
    reward: Rewarding = verify, on_answers: OnAnswers = lambda domain, samples, results: None,
) -> dict[str, Measures]:  # fmt: skip
    """Measures a model on every domain: greedily, with k samples per prompt if k > 0. Prompts with an environment are played in it.

    `on_answers` receives the first answer to every question of a domain and its reward.
    """
    runs: dict[str, Sampling] = {}
    if greedy:
        runs["greedy"] = Sampling(sampling.max_new_tokens, 0.0, 1.0, 0, sampling.stop_ids, sampling.stop_strings)
    if k:
        runs["sampled"] = Sampling(
            sampling.max_new_tokens, temperature, 1.0, 0, sampling.stop_ids, sampling.stop_strings
        )
    results: dict[str, dict[str, list[list[RewardResult]]]] = {domain: {} for domain in questions}
    answered: dict[str, list[Rollout]] = {domain: [] for domain in questions}
    for name, how in runs.items():
        count = 1 if name == "greedy" else k
        found = _answers(sampler, questions, how, count, seed, check_stop, tokenizer)
        for domain, asked in questions.items():
            samples, results[domain][name] = _rewarded(asked, found, tokenizer, how.stop_ids, reward)
            if name == next(iter(runs)):
                firsts = [group[0] for group in results[domain][name]]
                on_answers(domain, [group[0] for group in samples], firsts)
            answered[domain] += [answer.rollout for question in asked for answer in found[question.prompt.id]]
    return {domain: measure(results[domain], answered[domain], k) for domain in questions if questions[domain]}


@dataclass(frozen=True)
class Played:
    """`earned`: sum of the environment's turn rewards."""

    rollout: Rollout
    earned: float | None = None
    lost: bool = False  # by its environment


def _answers(
    sampler: TokenSampler,
    questions: Mapping[str, Sequence[Question]],
    sampling: Sampling,
    samples: int,
    seed: int,
    check_stop: Callable[[], None],
    tokenizer: Any,
) -> dict[str, list[Played]]:
    asked = {
        f"eval/{question.prompt.id}/{sample}": (question, sample)
        for of_domain in questions.values()
        for question in of_domain
        for sample in range(samples)
    }
    requests = [
        SampleRequest(name, question.prompt_ids, request_key(seed, question.prompt.id, EVAL_VISIT, sample), sampling)
        for name, (question, sample) in asked.items()
    ]
    notes: dict[str, dict[str, Any]] = {}
    prompts = {name: question.prompt for name, (question, _) in asked.items()}
    found: dict[str, list[Played]] = {}
    for rollout in answers(sampler, requests, check_stop, prompts=prompts, tokenizer=tokenizer, notes=notes):
        noted = notes.get(rollout.id, {})
        earned = earned_by(noted) if "turn_rewards" in noted else None
        found.setdefault(asked[rollout.id][0].prompt.id, []).append(Played(rollout, earned, "lost" in noted))
    return found


def _rewarded(
    asked: Sequence[Question],
    answered: Mapping[str, Sequence[Played]],
    tokenizer: Any,
    stop_ids: tuple[int, ...],
    reward: Rewarding,
) -> tuple[list[list[Sample]], list[list[RewardResult]]]:
    """Per prompt, the samples and one result for each. Answers rewarded by an environment are not rewarded again."""
    samples = [
        [
            Sample(question.prompt, response_text(answer.rollout.response_ids, tokenizer, stop_ids))
            if question.prompt.environment is None
            else played_sample(question.prompt, answer.rollout, tokenizer, stop_ids)
            for answer in answered[question.prompt.id]
        ]
        for question in asked
    ]
    played = [answer for question in asked for answer in answered[question.prompt.id]]
    every = [sample for group in samples for sample in group]
    rewarded = [one.lost or one.earned is not None for one in played]
    given = iter(reward([sample for sample, known in zip(every, rewarded, strict=True) if not known]))  # in parallel
    results = iter(
        [RewardResult(one.earned) if known else next(given) for one, known in zip(played, rewarded, strict=True)]
    )
    return samples, [[next(results) for _ in group] for group in samples]


def is_right(result: RewardResult) -> float:
    """1 right, 0 wrong, NaN no reward through no fault of the answer."""
    if result.reward is None:
        return 0.0 if result.by_answer else math.nan
    return float(result.reward >= result.full * (1 - ROUNDING))


def measure(results: Mapping[str, list[list[RewardResult]]], answers: Sequence[Rollout], k: int) -> Measures:
    found: dict[str, Any] = {}
    marks = {name: [np.array([is_right(one) for one in group]) for group in run] for name, run in results.items()}
    if "greedy" in marks:
        found["greedy"], found["greedy_stderr"] = mean_and_stderr([right[0] for right in marks["greedy"]])
    if "sampled" in marks:
        found["sampled"], found["sampled_stderr"] = mean_and_stderr([_mean(right) for right in marks["sampled"]])
        whole = [pass_at_k(right, k) for right in marks["sampled"]]
        found["pass_at_k"], found["pass_at_k_stderr"] = mean_and_stderr(whole)
        found["k"] = k
    first, first_marks = next(iter(results.values())), next(iter(marks.values()))
    every = [result for run in results.values() for group in run for result in group]
    rewards = [result.reward or 0.0 for group in first for result in group if not math.isnan(is_right(result))]
    return Measures(
        n=sum(1 for right in first_marks if not np.isnan(right).all()),
        unrewarded=sum(result.reward is None and not result.by_answer for result in every),
        failed=sum(result.reward is None and result.by_answer for result in every),
        reward=float(np.mean(rewards)) if rewards else None,
        length=float(np.mean([answer.response_ids.size for answer in answers])),
        truncated=float(np.mean([answer.stop == "length" for answer in answers])),
        **found,
    )


def _mean(marks: np.ndarray) -> float:
    known = marks[~np.isnan(marks)]
    return float(known.mean()) if known.size else math.nan


def pass_at_k(marks: np.ndarray, k: int) -> float:
    """Unbiased estimate from n >= k samples that at least one of k is right: 1 - C(n - c, k) / C(n, k).

    >>> pass_at_k(np.array([1, 0, 0, 0]), 2)
    0.5
    """
    known = marks[~np.isnan(marks)]
    n, correct = known.size, int((known >= 1).sum())
    if n < k:
        return math.nan
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def mean_and_stderr(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean over prompts and its standard error; None if nothing could be rewarded."""
    known = np.asarray([value for value in values if not math.isnan(value)])
    if not known.size:
        return None, None
    spread = float(known.std(ddof=1)) if known.size > 1 else 0.0
    return float(known.mean()), spread / math.sqrt(known.size)
