"""Micro-batches and their token budget. When memory runs out, the budget is halved and the attempt is repeated from the start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import TypeVar

import torch

from opd.common.errors import OpdError, TrainingError
from opd.models.language_model import Pack, pack
from opd.records import Rollout

T = TypeVar("T")
log = logging.getLogger(__name__)


def micro_batches(
    rollouts: Sequence[Rollout], tokens: int, device: torch.device, teacher_of: Mapping[str, str]
) -> list[Pack]:
    """Packs ordered by teacher (`teacher_of`: rollout id -> teacher), then length; a group is never split."""
    longest: dict[str, int] = {}
    for rollout in rollouts:
        longest[rollout.group] = max(longest.get(rollout.group, 0), rollout.length)
    ordered = sorted(rollouts, key=lambda item: (teacher_of.get(item.id, ""), longest[item.group], item.group))
    return [Pack.of(part, device) for part in pack(ordered, tokens, unit=attrgetter("unit"))]


class MicroBudget:
    """Tokens of one micro-batch. `on_smaller`: called with a new budget."""

    def __init__(self, tokens: int, on_smaller: Callable[[int], None] = lambda tokens: None) -> None:
        self.tokens, self._on_smaller = tokens, on_smaller

    def repeat(self, attempt: Callable[[], T], undo: Callable[[], None], rollouts: Sequence[Rollout]) -> T:
        """Run `attempt` with a budget that fits into memory. `undo`: discards the effects of a failed attempt.

        A failed pass may leave gradients for some weights and not for others, so the whole attempt is repeated.
        """
        while True:
            try:
                return attempt()
            except torch.OutOfMemoryError as error:
                smaller = self._smaller(rollouts)
                if smaller is None:
                    raise
                why = str(error).splitlines()[0][:200]
            undo()  # outside the handler: no traceback holds the failed pass's tensors any more
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            log.warning("memory ran out: micro_tokens %s -> %s; retrying (%s)", self.tokens, smaller, why)
            self.tokens = smaller
            self._on_smaller(smaller)

    def _smaller(self, rollouts: Sequence[Rollout]) -> int | None:
        """The next half that splits these rollouts further; None if each is already alone."""
        batches, tokens = self._batches(rollouts, self.tokens), self.tokens // 2
        while tokens and self._batches(rollouts, tokens) == batches:
            tokens //= 2
        return tokens or None

    @staticmethod
    def _batches(rollouts: Sequence[Rollout], tokens: int) -> int:
        return len(pack(rollouts, tokens, unit=attrgetter("unit")))


def once(attempt: Callable[[], T], undo: Callable[[], None], rollouts: Sequence[Rollout]) -> T:
    """`MicroBudget.repeat` for callers that cannot repeat an attempt on their own."""
    return attempt()


# --- Out of memory, in one sentence: which phase, and which setting helps ---


KNOBS = {
    "sample": "sampler.slots or rollout.max_new_tokens",
    "compare teachers": "teachers.NAME.batch_tokens",
    "score": "teachers.NAME.batch_tokens",
    "update": "train.micro_tokens, or set student.gradient_checkpointing: true",
    "evaluate": "sampler.slots or eval.max_new_tokens",
    "evaluate teachers": "sampler.slots or eval.max_new_tokens",
}


@contextmanager
def explain_memory(phase: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _out_of_memory(phase(), error) from None
    except RuntimeError as error:
        if isinstance(error, OpdError) or "can't allocate memory" not in str(error):
            raise
        raise _out_of_memory(phase(), error) from None


def _out_of_memory(phase: str, error: BaseException) -> TrainingError:
    knob = KNOBS.get(phase, "the size of the models, or load them in bfloat16")
    why = str(error).splitlines()[0][:200] if str(error) else "MemoryError"
    return TrainingError(f"out of memory in phase {phase!r}. Lower {knob}. ({why})")
