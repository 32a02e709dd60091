"""A fixed text that a teacher scores when it is opened, and again whenever its weights came back from somewhere.

probe = Probe(teacher, size=student.size, avoid=stop_ids)      # scored once: what it says from now on is compared with this
probe.check(teacher)                                           # after a page-in, a wake-up, a reconnect

A teacher whose weights were lost answers in time and in shape, with the same number for every token: only comparing tells.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from opd.errors import TrainingError
from opd.sampling.draws import request_key, uniforms
from opd.types import Author, Rollout, SignalNeed, TeacherLike

LENGTHS = ((3, 5), (2, 9), (6, 7))  # prompt and response of each text
FLAT = 1e-5  # nats: no two of its answers differ by more, so they say nothing about any token


class Probe:
    """What a teacher said when it was opened. `size`: ids of the shared vocabulary, of which those in `avoid` are not drawn.

    `tolerance` (nats) is 0 within a process: the same weights give the same bits. Across a network the other side may batch
    differently, so say there what rounding may cost.
    """

    def __init__(self, teacher: TeacherLike, size: int, *, avoid: Sequence[int] = (), tolerance: float = 0.0) -> None:
        self._tolerance, self._rollouts = tolerance, probe_rollouts(size, avoid)
        self.logprobs = self._score(teacher)
        refuse_lost(teacher.name, self.logprobs, size)

    def check(self, teacher: TeacherLike) -> None:
        """Refuse a teacher that does not say what it said when it was opened."""
        refuse_changed(teacher.name, self.logprobs, self._score(teacher), self._tolerance)

    def _score(self, teacher: TeacherLike) -> np.ndarray:
        signals = teacher.score(self._rollouts, SignalNeed("logprobs_at"))
        return np.concatenate([np.asarray(signal.values, dtype=np.float64) for signal in signals])


def refuse_lost(name: str, logprobs: np.ndarray, size: int) -> None:
    """Answers that say nothing about any token, of a model with so many ids."""
    strange = ~np.isfinite(logprobs)
    if strange.any():
        raise TrainingError(
            f"teacher {name!r}: {int(strange.sum())} of {logprobs.size} log-probs of a fixed probe are not finite (the first is "
            f"{logprobs[strange][0]}). Its weights are damaged, or its dtype is too narrow for it."
        )
    if np.ptp(logprobs) <= FLAT:
        raise TrainingError(
            f"teacher {name!r} answers {logprobs[0]:.4f} for every token of a fixed probe (-ln of its {size} ids is "
            f"{-np.log(size):.4f}), whatever stands before it: its weights are not there. Check the model, or its server."
        )


def refuse_changed(name: str, before: np.ndarray, now: np.ndarray, tolerance: float = 0.0) -> None:
    gap = np.abs(now - before)
    same = np.array_equal(now, before) if tolerance == 0 else bool((gap <= tolerance).all())
    if not same:
        worst = int(np.nan_to_num(gap, nan=np.inf).argmax())
        raise TrainingError(
            f"teacher {name!r} is no longer the one that was opened: token {worst} of a fixed probe had log-prob {before[worst]:.9g}, "
            f"and now has {now[worst]:.9g} (allowed difference {tolerance:g}). Its weights were changed or lost on the way. Nothing was "
            "trained on it; resume the run."
        )


def probe_rollouts(size: int, avoid: Sequence[int] = ()) -> list[Rollout]:
    """Texts of ids that any model of this vocabulary can read; always the same ones."""
    known = np.setdiff1d(np.arange(size, dtype=np.int32), np.asarray(avoid, dtype=np.int32))
    return [_rollout(f"probe/{number}", known, *lengths) for number, lengths in enumerate(LENGTHS)]


def _rollout(name: str, known: np.ndarray, prompt: int, response: int) -> Rollout:
    draws = uniforms(request_key(0, name, 0, 0), 0, prompt + response)
    ids = known[(draws * known.size).astype(np.int64)]
    zeros = np.zeros(response, dtype=np.float32)
    return Rollout(
        id=name,
        prompt_id=name,
        visit=0,
        sample=0,
        domain="probe",
        source="data",
        prompt_ids=ids[:prompt],
        response_ids=ids[prompt:],
        author=np.full(response, Author.DATA, dtype=np.uint8),
        logprob=zeros,
        logprob_sampled=zeros,
        logprob_stop=zeros,
        version=np.zeros(response, dtype=np.int32),
        stop="length",
    )
