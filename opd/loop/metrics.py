"""What is measured in a step: the time of each phase, the line in `metrics.jsonl`, and the monitors' probes."""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from opd.common.text import first_line
from opd.divergences.kinds import LOG_ZERO
from opd.engines.requests import request_key
from opd.evaluation import is_right
from opd.loop.oom_retry import micro_batches
from opd.models.language_model import Pack
from opd.objective.batch import Batch, own_turns
from opd.objective.micro import TokenStatistics
from opd.records import Author, Rollout, Sample, SampleRequest, SignalNeed
from opd.rollouts.episodes import TURNS
from opd.rollouts.rollouter import answers
from opd.teachers.views import texts_for

if TYPE_CHECKING:
    from opd.data.stream import PromptStream
    from opd.loop.parts import StageParts
    from opd.loop.ranks import Ranks
    from opd.objective.batch import Written
    from opd.objective.micro import Trace
    from opd.recipe.stage import Log


BINS = 10  # number of confidence bins
FEWEST = 100  # the fewest tokens of which 1 % is meaningful
PAIRS = 65_536  # pairs of tokens that are counted; the share of distinct ones depends on this number


@dataclass
class Clock:
    """Seconds by phase."""

    on_phase: Callable[[str], None] = lambda _: None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.on_phase(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


@dataclass
class StepReport:
    """What a step leaves for the reports."""

    metrics: dict[str, Any]
    written: Written
    traces: Mapping[str, Trace] = field(default_factory=dict)  # by rollout id
    statistics: list[tuple[Pack, TokenStatistics]] = field(default_factory=list)  # cleared once they are noted


def step_metrics(
    stage: str, step: int, rollouts: Sequence[Rollout], statistics: Sequence[tuple[Pack, TokenStatistics]],
    rewards: Mapping[str, float | None], seconds: Mapping[str, float], extra: Mapping[str, float],
    updates: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """The line for `metrics.jsonl`. `reverse_kl` is in nats per token, over the tokens the teacher scored.

    `entropy` is exact, over the tokens at which a term compared distributions. `entropy_sampled` is the mean of -log p of the
    student's sampled tokens, used when there is no exact value.
    """
    lengths = np.array([rollout.response_ids.size for rollout in rollouts])
    sampled = [rollout for rollout in rollouts if not np.isin(rollout.author, (Author.DATA, Author.REJECTED)).all()]
    metrics: dict[str, Any] = {
        "step": step,
        "stage": stage,
        "loss": sum(value for _, found in statistics for value in found.loss.values()) / updates
        if statistics
        else None,
    }
    by_domain: dict[str, list[np.ndarray]] = {}
    ids, by_id = list[np.ndarray](), list[np.ndarray]()
    for batch, found in statistics:
        for rollout, values in zip(
            batch.rollouts, np.split(found.reverse_kl, np.cumsum(batch.response_lengths)[:-1]), strict=True
        ):
            by_domain.setdefault(rollout.domain, []).append(values)
            ids.append(rollout.response_ids)
            by_id.append(values)
    joined = {domain: np.concatenate(parts) for domain, parts in sorted(by_domain.items())}
    divergences = _joined(list(joined.values()))
    metrics["reverse_kl"] = _mean(divergences)
    metrics["entropy"] = _mean(_joined([found.entropy for _, found in statistics]))
    if metrics["entropy"] is None and sampled:  # no term compared whole distributions: estimate it
        metrics["entropy_sampled"] = _mean(
            np.concatenate([-rollout.logprob[rollout.author == Author.STUDENT] for rollout in sampled])
        )
    if overlaps := [found.overlap for _, found in statistics if found.overlap.size]:
        metrics["overlap"] = _mean(_joined(overlaps))
    metrics["tokens"] = int(lengths.sum())
    metrics["response_length"] = float(lengths.mean()) if rollouts else 0.0
    metrics["truncated"] = float(np.mean([rollout.stop == "length" for rollout in rollouts])) if rollouts else 0.0
    metrics["mismatch"] = _mean(_joined([found.mismatch for _, found in statistics]))
    own = {rollout.id for rollout in rollouts if (rollout.author == Author.STUDENT).any()}
    given = [reward for name, reward in rewards.items() if reward is not None and name in own]
    metrics["reward"] = float(np.mean(given)) if given else None
    if rewards:
        metrics["unrewarded"] = sum(reward is None for reward in rewards.values()) / len(rewards)
    metrics |= {f"kl/{domain}": _mean(values) for domain, values in joined.items()}
    metrics |= calibration_error(rollouts, rewards)
    if "env/turns" in extra:
        metrics |= turn_metrics(statistics)
    metrics |= spread_metrics(divergences, _joined([found.mismatch for _, found in statistics]), sampled)
    metrics |= dominance(_joined(ids), _joined(by_id))
    counts = [item for _, found in statistics for item in found.counts.items()]
    for name in dict.fromkeys(name for name, _ in counts):  # shares of clipped and corrected tokens
        changed, every = np.sum([count for other, count in counts if other == name], 0).tolist()
        metrics[name] = changed / max(every, 1)
    metrics |= dict(extra)
    metrics |= {f"time/{phase}": round(value, 4) for phase, value in seconds.items()}
    return metrics


def turn_metrics(statistics: Sequence[tuple[Pack, TokenStatistics]]) -> dict[str, float]:
    """KL to the teacher by turn, from 1; and `kl_turns`, by how much it rises from the first turn to the last, in nats per token."""
    by_turn: dict[int, list[np.ndarray]] = {}
    rises = []
    for batch, found in statistics:
        parts = np.split(found.reverse_kl, np.cumsum(batch.response_lengths)[:-1])
        for rollout, values in zip(batch.rollouts, parts, strict=True):
            means = [_mean(values[first:end]) for first, end in own_turns(rollout)]
            for turn, (first, end) in enumerate(own_turns(rollout)[:TURNS], 1):
                by_turn.setdefault(turn, []).append(values[first:end])
            if len(means) > 1 and means[0] is not None and means[-1] is not None:
                rises.append(means[-1] - means[0])
    metrics = {f"kl_turn/{turn}": _mean(np.concatenate(parts)) for turn, parts in sorted(by_turn.items())}
    known = {name: value for name, value in metrics.items() if value is not None}
    return known | ({"kl_turns": float(np.mean(rises))} if rises else {})


def spread_metrics(divergences: np.ndarray, mismatch: np.ndarray, sampled: Sequence[Rollout]) -> dict[str, float]:
    """What a mean hides: a few tokens with most of the KL, ratios far from 1, and answers that are all alike."""
    found: dict[str, float] = {}
    sizes = np.abs(divergences[~np.isnan(divergences)])
    if sizes.size >= FEWEST and sizes.sum() > 0:
        few = -(-sizes.size // 100)
        found["kl_top"] = float(np.partition(sizes, sizes.size - few)[-few:].sum() / sizes.sum())
        found["kl_largest"] = float(sizes.max())
    known = mismatch[~np.isnan(mismatch)]
    if known.size:
        found["mismatch_outside"] = float(np.mean(known > np.log(2)))
    pairs = [ids[:-1] << 32 | ids[1:] for rollout in sampled if (ids := rollout.response_ids.astype(np.int64)).size > 1]
    if pairs:
        every = np.concatenate(pairs)[:PAIRS]
        found["distinct"] = np.unique(every).size / every.size
    return found


def dominance(ids: np.ndarray, divergences: np.ndarray) -> dict[str, float]:
    """The largest difference between a token's share of the KL and its share of the text."""
    known = ~np.isnan(divergences)
    sizes = np.abs(divergences[known])
    if sizes.size < FEWEST or not sizes.sum() > 0:
        return {}
    which = np.unique(ids[known], return_inverse=True)[1]
    held, seen = np.bincount(which, weights=sizes) / sizes.sum(), np.bincount(which) / sizes.size
    return {"kl_one": float((held - seen).max())}


def calibration_error(rollouts: Sequence[Rollout], rewards: Mapping[str, float | None]) -> dict[str, float]:
    """How far the student's confidence in its answers is from how often they are right, over tenths of confidence."""
    own = [rollout for rollout in rollouts if rollout.logprob.size and (rollout.author == Author.STUDENT).all()]
    sure = [rollout for rollout in own if not np.isnan(rollout.logprob).any()]  # drawn under another prompt: unknown
    known = [(rollout, reward) for rollout in sure if (reward := rewards.get(rollout.id)) is not None]
    if len(known) < BINS:
        return {}
    confidence = np.array([float(np.exp(rollout.logprob.mean())) for rollout, _ in known])
    right = np.array([reward >= 1 for _, reward in known], dtype=float)
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [abs((confidence - right)[bins == number].sum()) for number in range(BINS)]
    return {"ece": float(sum(gaps) / len(known))}


def disagreements(statistics: Sequence[tuple[Pack, TokenStatistics]]) -> dict[str, dict[str, dict[str, float]]]:
    """By rollout and role, what `RolloutStore.note_disagreement` notes, from the first pass over each rollout."""
    noted: dict[str, dict[str, dict[str, float]]] = {}
    for pack, found in statistics:
        ends = np.cumsum(pack.response_lengths)
        for role in sorted({*found.kl, *found.log_ratio}):
            kl, ratio = found.kl.get(role), found.log_ratio.get(role)
            for rollout, end in zip(pack.rollouts, ends, strict=True):
                rows = slice(end - rollout.response_ids.size, end)
                facts = _disagreement(None if kl is None else kl[rows], None if ratio is None else ratio[rows])
                if facts:
                    noted.setdefault(rollout.id, {}).setdefault(role, facts)
    return noted


def _disagreement(kl: np.ndarray | None, ratio: np.ndarray | None) -> dict[str, float]:
    found: dict[str, float] = {}
    if kl is not None and (mean := _mean(kl)) is not None:
        found["kl"] = float(f"{mean:.6g}")
    if ratio is None:
        return found
    sizes = np.abs(ratio)
    sizes[~(sizes < -LOG_ZERO / 2)] = -1.0  # unknown, or a token that the teacher does not have
    if sizes.size and sizes.max() >= 0:
        at = int(sizes.argmax())
        found |= {"log_ratio": float(f"{ratio[sizes >= 0].mean():.6g}"), "largest": float(f"{ratio[at]:.6g}"), "at": at}
    return found


def study(stream: PromptStream, batch: Batch, result: StepResult, ranks: Ranks) -> dict[str, float]:
    """Show a curriculum what a step measured of its prompts. Returns metrics."""
    curriculum = stream.curriculum
    assert curriculum is not None
    means: dict[str, float] = {}
    for pack, found in result.statistics:
        values = found.overlap if curriculum.compared else found.reverse_kl
        parts = np.split(values, np.cumsum(pack.response_lengths)[:-1]) if values.size else []
        for rollout, part in zip(pack.rollouts, parts, strict=bool(values.size)):
            mean = _mean(np.abs(part))
            if mean is not None:
                means[rollout.id] = mean
    return stream.study(ranks.share(lambda: curriculum.measures(batch.rollouts, batch.rewards, means)))


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Join arrays. A step that only scores has none."""
    return np.concatenate(parts) if parts else np.zeros(0)


def _mean(values: np.ndarray) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


# --- Which completions of a step are written down: `log.samples` ---


def sampled_ids(log: Log, batch: Batch, step: int) -> frozenset[str]:
    """A few per domain of the rollouts that a step trains on, the newest first. Empty in most steps."""
    if not log.samples or (step - 1) % log.samples_every:
        return frozenset()
    domains = {rollout.id: rollout.domain for rollout in batch.rollouts}
    newest = [(name, domains[name]) for name in reversed(batch.written.ids) if name in domains]
    return frozenset(few_per_domain(newest, log.samples))


def few_per_domain(items: Iterable[tuple[str, str]], count: int) -> list[str]:
    """The first ids of every domain, in order. `items`: (id, domain)."""
    seen: Counter[str] = Counter()
    kept = []
    for name, domain in items:
        if seen[domain] < count:
            seen[domain] += 1
            kept.append(name)
    return kept


# --- The result of a step ---


@dataclass(repr=False)
class StepResult:
    """The result of a step: `result.loss`, and all metrics as `result.metrics`, with the names of metrics.jsonl."""

    measured: dict[str, float]  # values from gates and other parts of terms
    statistics: list[tuple[Pack, TokenStatistics]] = field(default_factory=list)  # of every micro-batch
    norms: list[float] = field(default_factory=list)  # gradient norm of each update
    rate: float = 0.0
    step: int = 0

    @cached_property
    def metrics(self) -> dict[str, Any]:
        rollouts = list({rollout.id: rollout for pack, _ in self.statistics for rollout in pack.rollouts}.values())
        if not rollouts:
            return dict(self.measured)
        extra = {"lr": self.rate, "grad_norm": max(self.norms), **self.measured}
        found = step_metrics("", self.step, rollouts, self.statistics, {}, {}, extra, updates=len(self.norms))
        return {name: value for name, value in found.items() if name != "stage" and value is not None}

    @property
    def loss(self) -> float:
        """The loss of the batch: the mean over updates, if there were several."""
        return float(self.metrics.get("loss", 0.0))

    def __repr__(self) -> str:
        shown = {name: self.metrics[name] for name in ("loss", "reverse_kl", "grad_norm", "lr") if name in self.metrics}
        return f"StepResult(step={self.step}, {', '.join(f'{name}={value:.4g}' for name, value in shown.items())})"


# --- Probes that monitors run after a step: gradients of single domains, and teachers that continue the student's answers ---
#
# They read weights and change nothing, so a run trains to the same bits with or without them.


log = logging.getLogger(__name__)

VISIT = -4  # keys draws that nothing else uses
PHASE = "probe"
COMPARED = 1_000_000  # the most numbers of a gradient that are compared
LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class TrainedStep:
    """A step that has just been trained."""

    parts: StageParts
    step: int
    batch: Batch
    clock: Clock
    evaluates: bool

    # --- Gradients ---

    def cosines(self, answers: int) -> dict[str, float]:
        if len(set(self.batch.owners.values())) < 2:
            return {}
        with self.clock(PHASE):
            if self.parts.ranks.sharded:
                return self._cosines_on_ranks(answers)
            found = {domain: self._gradient(chosen) for domain, chosen in self._by_domain(answers).items()}
            known = {domain: gradient for domain, gradient in found.items() if bool(gradient.any())}
            if len(known) < 2:
                return {}
            whole = torch.stack(list(known.values())).sum(0)
            return {
                domain: float(torch.cosine_similarity(gradient, whole - gradient, dim=0))
                for domain, gradient in known.items()
            }

    def _cosines_on_ranks(self, answers: int) -> dict[str, float]:
        """Each rank holds rows of the gradient, and dot products add up. Replica groups add the same values, which cancel in the cosine."""
        found = {domain: self._rows(chosen) for domain, chosen in self._by_domain(answers).items()}
        whole = torch.stack(list(found.values())).sum(0)
        pairs = {domain: (rows, whole - rows) for domain, rows in found.items()}
        products = {name: [float(a @ b), float(a @ a), float(b @ b)] for name, (a, b) in pairs.items()}
        total = {name: np.sum([part[name] for part in self.parts.ranks.gather(products)], 0) for name in products}
        known = {name: values for name, values in total.items() if values[1]}
        if len(known) < 2:
            return {}
        return {name: float(both / max((own * other) ** 0.5, 1e-30)) for name, (both, own, other) in known.items()}

    def _rows(self, rollouts: Sequence[Rollout]) -> Tensor:
        """This rank's rows of the same gradient. Teachers' hidden states are on the rank that trained on them."""
        parts, train, student = self.parts, self.parts.spec.train, self.parts.student
        mine = {rollout.id for rollout in parts.ranks.deal(self.batch.rollouts)}
        batch = Batch(rollouts, self.batch.signals, self.batch.rewards, owners=self.batch.owners)
        autocast = partial(torch.autocast, student.device.type, torch.bfloat16, enabled=train.precision == "autocast")

        def cut(part: Sequence[Rollout]) -> list[Pack]:
            here = [rollout for rollout in part if rollout.id in mine]
            return micro_batches(here, train.micro_budget, student.device, self.batch.owners)

        with autocast():
            prepared = parts.objective.prepare(student, batch, self.step, cut, train.updates, parts.ranks.complete)
        weights = prepared.weights(rollouts)
        for micro in student.passes(cut(rollouts)):
            with autocast():
                loss, _ = student.inside(partial(parts.objective, student, micro, prepared, weights))
            if loss.requires_grad:
                loss.backward()
        rows = torch.cat(
            [part.float().flatten() for part in parts.optimiser.gradients(last_layer(student.trainable()))]
        )
        parts.trainer.learner.discard()
        return rows[:: -(-rows.numel() // COMPARED) or 1]

    def _by_domain(self, answers: int) -> dict[str, list[Rollout]]:
        """The first answers of each domain, in whole groups."""
        found: dict[str, dict[str, list[Rollout]]] = {}
        for rollout in self.batch.rollouts:
            found.setdefault(rollout.domain, {}).setdefault(rollout.unit, []).append(rollout)
        chosen: dict[str, list[Rollout]] = {}
        for domain, groups in found.items():
            for members in groups.values():
                if len(chosen.setdefault(domain, [])) < answers:
                    chosen[domain] += members
        return chosen

    def _gradient(self, rollouts: Sequence[Rollout]) -> Tensor:
        """The gradient of the objective on these rollouts alone, with respect to the last layer, subsampled if it is large."""
        parts, train = self.parts, self.parts.spec.train
        student, weights = parts.student, list(last_layer(parts.student.trainable()).values())
        stride = -(-sum(weight.numel() for weight in weights) // COMPARED)
        batch = Batch(rollouts, self.batch.signals, self.batch.rewards, owners=self.batch.owners)
        autocast = partial(torch.autocast, student.device.type, torch.bfloat16, enabled=train.precision == "autocast")

        def cut(part: Sequence[Rollout]) -> list[Pack]:
            return micro_batches(part, train.micro_budget, student.device, self.batch.owners)

        total = torch.zeros((), device=student.device)
        with autocast():
            prepared = parts.objective.prepare(student, batch, self.step, cut, train.updates)
        for micro in cut(rollouts):
            with autocast():
                loss, _ = parts.objective(student, micro, prepared, prepared.weights(rollouts))
            if loss.requires_grad:
                gradients = torch.autograd.grad(loss, weights, allow_unused=True)
                flat = [_flat(gradient, weight) for gradient, weight in zip(gradients, weights, strict=True)]
                total = total + torch.cat(flat)[::stride]
            parts.context.check_stop()
        return total

    # --- What teachers say about the answers ---

    def teachers_calibration(self, answers: int) -> dict[str, float]:
        known = self._rewarded(answers)
        if not known or self.parts.scorer.pager is not None:  # their heads are no longer in memory
            return {}
        with self.clock(PHASE):
            found = self._logprobs(known)
        whole = [replace(rollout, logprob=found[rollout.id]) for rollout in known if rollout.id in found]
        return {f"{name}/teacher": value for name, value in calibration_error(whole, self.batch.rewards).items()}

    def _logprobs(self, rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
        """The teacher's log-probs of the response tokens, if it has read all of them with the student's tokenizer."""
        direct = self.batch.signals.get(("teacher", "logprobs_at"))
        if direct is not None:
            values = {rollout.id: np.asarray(direct[rollout.id].values, dtype=np.float32) for rollout in rollouts}
            return {name: value for name, value in values.items() if not np.isnan(value).any()}
        hidden = self.batch.signals.get(("teacher", "hidden"), {})
        by_teacher: dict[str, list[Rollout]] = {}
        for rollout in (rollout for rollout in rollouts if rollout.id in hidden):
            signal = hidden[rollout.id]
            if signal.values is None:  # the values are on another rank
                continue
            offered = "logprobs_at" in self.parts.teachers[signal.teacher].offers
            if offered and signal.crossed is None and signal.mask.all():
                by_teacher.setdefault(signal.teacher, []).append(rollout)
        found: dict[str, np.ndarray] = {}
        for name, mine in by_teacher.items():  # log-probs follow from hidden states, without reading again
            signals = self.parts.teachers[name].score(mine, SignalNeed("logprobs_at", hidden=hidden))
            found |= {rollout.id: np.asarray(one.values) for rollout, one in zip(mine, signals, strict=True)}
        everyone = {name: value for part in self.parts.ranks.gather(found) for name, value in part.items()}
        return {rollout.id: everyone[rollout.id] for rollout in rollouts if rollout.id in everyone}

    # --- Teachers that take over an answer ---

    def taken_over(self, answers: int, depth: float) -> dict[str, float]:
        asked = self._taken(answers)
        if not asked:
            return {}
        with self.clock(PHASE):
            first = self._gain(asked, 0.0)
            late = self._gain(asked, depth)
        return {"takeover/first": first, "takeover/late": late} if not np.isnan(first + late) else {}

    def _taken(self, answers: int) -> list[tuple[Rollout, np.ndarray]]:
        """Each answer with the prompt that its teacher reads."""
        found = [(rollout, self._read(rollout)) for rollout in self._rewarded(answers)]
        return [(rollout, ids) for rollout, ids in found if ids is not None]

    def _rewarded(self, answers: int) -> list[Rollout]:
        """Answers of the student that have a teacher and a reward, spread evenly over the step."""
        known = [
            rollout
            for rollout in self.batch.rollouts
            if self.batch.owners.get(rollout.id)
            and self.batch.rewards.get(rollout.id) is not None
            and (rollout.author == Author.STUDENT).all()
        ]
        return known[:: max(1, len(known) // answers)][:answers]

    def _read(self, rollout: Rollout) -> np.ndarray | None:
        """The prompt that the teacher reads. None if it reads nothing, uses another tokenizer, or would not fit."""
        parts, prompts = self.parts, self.batch.prompts
        name = parts.scorer.teacher_for(prompts[rollout.prompt_id])
        groups = parts.scorer.groups_for(name, {rollout.group: self.batch.groups[rollout.group]})
        teacher = parts.teachers[name]
        (text,) = texts_for(parts.spec.teachers[name].view, [rollout], prompts, groups, teacher.context)
        if text is None or text.crossed or len(text.spans) != 1 or text.spans[0][0] != 0:
            return None
        ids = text.ids[: text.spans[0][2]]
        return (
            ids
            if ids.size + parts.rollouter.sampling.max_new_tokens <= min(parts.samplers.max_length, teacher.context)
            else None
        )

    def _gain(self, asked: Sequence[tuple[Rollout, np.ndarray]], depth: float) -> float:
        """How much more often teachers are right than the student was, when they continue after this part of the student's answers."""
        parts, prompts = self.parts, self.batch.prompts
        by_teacher: dict[str, list[SampleRequest]] = {}
        for rollout, ids in asked:
            kept = rollout.response_ids[: int(depth * rollout.response_ids.size)]
            key = request_key(parts.spec.seed, rollout.id, VISIT, kept.size)
            request = SampleRequest(rollout.id, ids, key, parts.rollouter.sampling, kept if kept.size else None)
            by_teacher.setdefault(parts.scorer.teacher_for(prompts[rollout.prompt_id]), []).append(request)
        rollouts = {rollout.id: rollout for rollout, _ in asked}
        texts = {
            answer.id: parts.text(answer)
            for name, requests in by_teacher.items()
            for answer in answers(parts.samplers.teacher(name), requests, parts.context.check_stop)
        }
        samples = [Sample(prompts[rollouts[name].prompt_id], text) for name, text in texts.items()]
        with parts.rewards.lock:
            results = parts.ranks.share(lambda: list(parts.rewards.rewarder(samples)))
        gains = [
            is_right(result) - is_right(replace(result, reward=self.batch.rewards[name]))
            for name, result in zip(texts, results, strict=True)
        ]
        return float(np.nanmean(gains)) if not np.isnan(gains).all() else float("nan")


def take_probes(parts: StageParts, step: int, batch: Batch, clock: Clock) -> dict[str, float]:
    """Measurements that the monitors of a stage need beyond its metrics. Either all ranks measure, or none."""
    evaluates = bool(parts.spec.eval.every and parts.spec.eval.prompts)
    probe = TrainedStep(parts, step, batch, clock, evaluates)
    graphs, parts.student.graphs = parts.student.graphs, None  # only training decides which passes are recorded
    try:
        return {name: value for monitor in parts.spec.monitors.watch for name, value in monitor.measure(probe).items()}
    except torch.OutOfMemoryError as error:
        if parts.ranks.size > 1:
            raise
        log.warning("step %s: no memory for the monitors' probes, which are left out (%s)", step, first_line(error))
        return {}
    finally:
        parts.student.graphs = graphs


def last_layer(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The parameters that a backward pass reaches first; all of them if layers have no numbers."""
    numbers = {name: int(found[0]) for name in parameters if (found := LAYER.findall(name))}
    last = max(numbers.values(), default=None)
    return {name: parameter for name, parameter in parameters.items() if numbers.get(name) == last}


def _flat(gradient: Tensor | None, weight: nn.Parameter) -> Tensor:
    found = torch.zeros_like(weight) if gradient is None else gradient
    return found.detach().float().flatten()
