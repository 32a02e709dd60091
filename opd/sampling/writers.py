"""Who writes the answers of a step. One writer answers a prompt, all its samples; which one is a draw keyed by the
visit.

The student has what the shares of the others leave. Everything that is written goes into the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from opd.data.render import render_completion
from opd.data.stream import Visit
from opd.settings import Choice, Fraction
from opd.types import Author, TokenSampler

AUTHORS = {"student": Author.STUDENT, "teacher": Author.TEACHER, "data": Author.DATA}


@dataclass(frozen=True)
class Desk:
    """What a writer has at hand. Samplers of teachers are opened when they are first asked for."""

    tokenizer: Any
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    teacher_for: Mapping[str, str]  # domain -> teacher
    student: TokenSampler
    teacher: Callable[[str], TokenSampler]
    mixed: Callable[[str], TokenSampler]  # the student with that teacher mixed in
    template_kwargs: Callable[[Visit], Mapping[str, Any]]

    def completion(self, visit: Visit, text: str | None = None) -> tuple[np.ndarray, bool]:
        """A text, or else the dataset's own answer, as ids that end in a stop id; and whether the limit cut it off."""
        prompt = visit.prompt
        if text is not None:
            prompt = replace(prompt, fields={**prompt.fields, "completion": text})
        return render_completion(
            prompt, self.tokenizer, self.max_new_tokens, self.stop_ids, self.template_kwargs(visit)
        )


class Writer(Choice):
    """Either it samples (`sampler`), or it has the answer at hand (`completion`)."""

    family = "writer"
    author: ClassVar[Literal["student", "teacher", "data"]]  # whose tokens they are, to the terms of the objective
    reads_completions: ClassVar[bool] = False  # so that prompts without one are found at the start

    share: Fraction = Field(0.0, description="of the prompts")

    def source(self, visit: Visit, desk: Desk) -> str:
        """What the store notes as the rollout's source. Rollouts of one source are sampled together."""
        return self.name

    def completion(self, visit: Visit, desk: Desk) -> tuple[np.ndarray, bool] | None:
        """(response ids, whether they were cut off), or None: it is sampled."""
        return None

    def sampler(self, source: str, desk: Desk) -> TokenSampler:
        raise NotImplementedError


class StudentWriter(Writer):
    name = "student"
    author = "student"

    def sampler(self, source: str, desk: Desk) -> TokenSampler:
        return desk.student


class MixedWriter(Writer):
    """The student, each token drawn from the mixture with the prompt's own teacher."""

    name = "mixed"
    author = "student"

    def source(self, visit: Visit, desk: Desk) -> str:
        return f"mixed:{desk.teacher_for[visit.prompt.domain]}"

    def sampler(self, source: str, desk: Desk) -> TokenSampler:
        return desk.mixed(source.removeprefix("mixed:"))


class TeacherWriter(Writer):
    """The prompt's own teacher."""

    name = "teacher"
    author = "teacher"

    def source(self, visit: Visit, desk: Desk) -> str:
        return f"teacher:{desk.teacher_for[visit.prompt.domain]}"

    def sampler(self, source: str, desk: Desk) -> TokenSampler:
        return desk.teacher(source.removeprefix("teacher:"))


class DataWriter(Writer):
    """The dataset's own answer."""

    name = "data"
    author = "data"
    reads_completions = True

    def completion(self, visit: Visit, desk: Desk) -> tuple[np.ndarray, bool] | None:
        return desk.completion(visit)
