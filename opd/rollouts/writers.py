"""Who writes the answers of a step. One writer answers all samples of a prompt; a draw keyed by the visit chooses it.

The student writes what the other writers' shares leave. All answers go into the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from opd.common.errors import DataError, TrainingError
from opd.data.prompts import render_completion
from opd.records import Author, Prompt, TokenSampler, Visit
from opd.registry import Choice, Count, Family, Fraction, Positive, StageView

if TYPE_CHECKING:
    from opd.engines.alongside import LoggingSampler


AUTHORS = {
    "student": Author.STUDENT,
    "teacher": Author.TEACHER,
    "data": Author.DATA,
    "rejected": Author.REJECTED,
}


@dataclass(frozen=True)
class WriterContext:
    """What a writer can use. Samplers of teachers are opened on first use."""

    tokenizer: Any
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    teacher_for: Callable[[Prompt], str]  # the name of the prompt's own teacher
    student: TokenSampler | LoggingSampler
    teacher: Callable[[str], TokenSampler]
    mixed: Callable[[str], TokenSampler]  # the student mixed with that teacher
    template_kwargs: Callable[[Visit], Mapping[str, Any]]

    def completion(self, visit: Visit, text: str | None = None) -> tuple[np.ndarray, bool]:
        """Token ids of a text, or of the dataset's own answer, ending in a stop id; and whether the limit cut it off."""
        prompt = visit.prompt
        if text is not None:
            prompt = replace(prompt, fields={**prompt.fields, "completion": text})
        return render_completion(
            prompt, self.tokenizer, self.max_new_tokens, self.stop_ids, self.template_kwargs(visit)
        )


class Writer(Choice):
    """A writer either samples (`sampler`) or has the answer already (`completion`)."""

    family = "writer"
    author: ClassVar[Literal["student", "teacher", "data", "rejected"]]  # of its tokens, for the objective's terms
    reads: ClassVar[str] = ""  # the column with its answers; rows without one are found at the start
    samples_teacher: ClassVar[bool] = False  # uses the prompt's own teacher, which needs a model in this process
    takes_the_rest: ClassVar[bool] = False  # takes the remaining prompts, so `rollout.writers` cannot name it
    shows_more: ClassVar[bool] = False  # it may read something other than the training prompt
    replays: ClassVar[bool] = False  # answers stored prompts again, in place of new ones

    share: Fraction = Field(0.0, description="share of the prompts for which it writes all samples")
    samples: Count = Field(
        0, le=65_536, description="samples of every group that it writes, instead of a share of the prompts"
    )

    def check(self, view: StageView) -> Iterable[str]:
        if self.samples_teacher and "teacher" not in view.roles:
            yield "there is no teacher to sample from. Give one, or drop it."

    def asks(self, prompt: Prompt) -> Prompt | None:
        """What it reads instead of the prompt. None: there is nothing to read, and the student answers the plain prompt.

        The answer is trained on under the original prompt.
        """
        return prompt

    def shows(self) -> set[str]:
        """Fields of a row that it names."""
        return set()

    def source(self, visit: Visit, context: WriterContext) -> str:
        """The rollout's source in the store. Rollouts of one source are sampled together."""
        return self.name

    def completion(self, visit: Visit, context: WriterContext) -> tuple[np.ndarray, bool] | None:
        """(response ids, whether they were cut off), or None if the answer is sampled."""
        return None

    def turns(self, prompt: Prompt) -> Sequence[str] | None:
        """All turns of an episode, or None if they are sampled."""
        return None

    def sampler(self, source: str, context: WriterContext) -> TokenSampler | LoggingSampler:
        raise TrainingError(
            f"writer {self.name} has neither a completion nor a sampler for a prompt. Write one of them."
        )


class StudentWriter(Writer):
    name = "student"
    author = "student"
    takes_the_rest = True

    def sampler(self, source: str, context: WriterContext) -> TokenSampler | LoggingSampler:
        return context.student


class MixedWriter(Writer):
    """The student, with each token drawn from the mixture with the prompt's own teacher."""

    name = "mixed"
    author = "student"
    samples_teacher = True
    takes_the_rest = True

    def source(self, visit: Visit, context: WriterContext) -> str:
        return f"mixed:{context.teacher_for(visit.prompt)}"

    def sampler(self, source: str, context: WriterContext) -> TokenSampler | LoggingSampler:
        return context.mixed(source.removeprefix("mixed:"))


class ShownWriter(Writer):
    """The student, after reading what a view shows of the prompt (HDPO, hints, reprompting)."""

    name = "shown"
    shows_more = True

    view: Annotated[Any, Family("view")] = Field(description="of shown: what the student reads when it answers")
    trained_as: Literal["student", "teacher"] = Field(
        "student", description="of shown: as whose tokens the objective's terms (`on`) treat them"
    )

    @property
    def author(self) -> Literal["student", "teacher", "data", "rejected"]:  # type: ignore[override]
        return self.trained_as

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if not self.view.of_prompt:
            yield (
                f"the view {self.view.name} shows other answers, and there are none yet. Use template, instruction or "
                "context; or rollout.rescue, for prompts that all samples failed."
            )
        elif not self.view.reprompts:
            yield f"the view {self.view.name} does not show a prompt that can be answered. Use template, instruction or context."
        if self.view.as_sampled:
            yield "the view same shows what the student reads already. Choose one that shows more."
        yield from self.view.idle_for_student

    def shows(self) -> set[str]:
        found: set[str] = self.view.shows()
        return found

    def asks(self, prompt: Prompt) -> Prompt | None:
        found: Prompt | None = self.view.rewrite(prompt)
        return found

    def source(self, visit: Visit, context: WriterContext) -> str:
        return f"shown:{self.view.name}"

    def sampler(self, source: str, context: WriterContext) -> TokenSampler | LoggingSampler:
        return context.student


class TeacherWriter(Writer):
    """The prompt's own teacher writes the answer."""

    name = "teacher"
    author = "teacher"
    samples_teacher = True

    def source(self, visit: Visit, context: WriterContext) -> str:
        return f"teacher:{context.teacher_for(visit.prompt)}"

    def sampler(self, source: str, context: WriterContext) -> TokenSampler | LoggingSampler:
        return context.teacher(source.removeprefix("teacher:"))


class DataWriter(Writer):
    """The answer is the dataset's own."""

    name = "data"
    author = "data"
    reads = "completion"

    def completion(self, visit: Visit, context: WriterContext) -> tuple[np.ndarray, bool] | None:
        return context.completion(visit)


class OracleWriter(Writer):
    """The environment's oracle plays the episodes: demonstrations for behaviour cloning."""

    name = "oracle"
    author = "data"

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if not view.environments:
            yield "the oracle of an environment plays, and there is none. Set rollout.environment, or use data_share."
        for environment in view.environments:
            if not environment.has_oracle:
                yield f"environment {environment.name} has no oracle that could play. Use an environment with one, or drop it."

    def turns(self, prompt: Prompt) -> Sequence[str] | None:
        found: Sequence[str] | None = prompt.environment.oracle(prompt) if prompt.environment is not None else None
        if found is None:
            raise DataError(
                f"prompt {prompt.id!r}: its environment's oracle does not know it, or it has no environment."
            )
        return found

    def sampler(self, source: str, context: WriterContext) -> TokenSampler | LoggingSampler:
        return context.student  # which is asked for nothing: the episode ends after the oracle's turns


class RejectedWriter(Writer):
    """The answer is the dataset's rejected one, from rows with `chosen` and `rejected`."""

    name = "rejected"
    author = "rejected"
    reads = "rejected"

    def completion(self, visit: Visit, context: WriterContext) -> tuple[np.ndarray, bool] | None:
        return context.completion(visit, visit.prompt.fields[self.reads])


class ReplayWriter(Writer):
    """Answers that the student wrote in earlier steps of this stage, with the log-probs and policy versions of that time."""

    name = "replay"
    author = "student"
    replays = True

    capacity: Positive = Field(1000, description="of replay: number of newest prompts to draw from")
    least: Positive = Field(1, description="of replay: no replay before the buffer has so many prompts")

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        rollout = view.rollout
        if self.samples:
            yield f"replay repeats whole groups, so samples {self.samples} has no meaning. Set `share`."
        if self.least > self.capacity:
            yield f"least ({self.least}) must not be more than capacity ({self.capacity}): the buffer would never be ready."
        if rollout.staleness:
            yield (
                f"replay with rollout.staleness {rollout.staleness}: which answers were trained on would depend on how fast sampling is. "
                "Set staleness: 0."
            )
        for key in ("rescue", "takeover", "demonstrations", "experience", "contrast"):
            if getattr(rollout, key):
                yield f"replay with rollout.{key}, which changes groups after they are written. Drop one of them."
        if view.retain is not None:
            yield f"replay reads answers of earlier steps, and store.retain {view.retain} deletes them. Set store.retain: null."

    def ready(self, groups: int) -> bool:
        """Whether a buffer with so many groups may be drawn from."""
        return groups >= self.least
