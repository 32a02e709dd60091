"""Out of memory, said in one sentence: where, and which knob helps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from opd.errors import OpdError, TrainingError

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
