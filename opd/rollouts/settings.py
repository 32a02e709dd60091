"""The keys of `rollout`. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from opd import registry
from opd.common.chat_client import ChatQuestion, Endpoint
from opd.common.short_forms import SHORT_FORMS
from opd.data.prompts import field_texts, fields_of, filled, question, well_formed
from opd.engines.kinds import InFlight
from opd.records import Prompt
from opd.registry import SETTINGS, Count, Family, Fraction, Positive, Word, changed
from opd.rollouts.environments import AnyEnvironment

if TYPE_CHECKING:
    from opd.rollouts.writers import Writer


class Rollouts(BaseModel):
    """Who writes the tokens of a step, how many, and how they are drawn."""

    model_config = SETTINGS
    prompts: Positive = Field(64, le=1_000_000)
    samples: Positive = Field(1, le=65_536, description="rollouts per prompt (the group)")
    max_new_tokens: Positive = 128
    temperature: float = Field(1.0, ge=0, le=100, description="0: greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Count = Field(0, le=10_000, description="0: no limit")
    stop: list[Word] = Field(
        default_factory=list, max_length=64, description="stop strings, in addition to the models' stop ids"
    )
    data_share: Fraction = Field(
        0.0, description="share of prompts answered by the dataset's completion (GKD: 1 - lambda)"
    )
    teacher_share: Fraction = Field(0.0, description="share of prompts answered by the prompt's own teacher")
    teacher_mix: float = Field(
        0.0, ge=0, lt=1, description="tokens are drawn from (1 - mix) * student + mix * teacher (MiniLLM: 0.2)"
    )
    writers: Annotated[list[Annotated[Any, Family("writer")]], SHORT_FORMS["rollout.writers"]] = Field(
        default_factory=list, max_length=100, description="further writers, each with a share of the prompts"
    )
    share_schedule: Annotated[Any, Family("share_schedule")] | None = Field(
        None, description="how the writers' shares change during the stage: line, validation_loss"
    )
    length_schedule: Annotated[Any, Family("length_schedule")] | None = Field(
        None, description="how the limit on new tokens grows up to max_new_tokens: line, matched"
    )
    segment: Positive | None = Field(
        None,
        description="new tokens of an answer per step: the next step continues it, and a group is trained on when all its answers have ended",
    )
    teacher_prefix: TeacherPrefix | None = Field(
        None, description="the prompt's own teacher writes the first tokens of the student's answers (TrOPD)"
    )
    environment: AnyEnvironment | None = Field(
        None, description="what answers between the student's turns; default: one turn, and no environment"
    )
    rescue: Rescue | None = Field(
        None, description="answer prompts that all samples failed again, under a view (HDPO, KEPO)"
    )
    takeover: Takeover | None = Field(
        None, description="of environments: somebody else plays a turn, and the student continues from there (SCoRe)"
    )
    experience: Experience | None = Field(
        None, description="a text that a model writes about a step's answers, for teachers' views to show (OEL)"
    )
    demonstrations: Demonstrations | None = Field(
        None, description="answers of a model at a chat endpoint, which replace the student's failed ones"
    )
    contrast: Count = Field(
        0,
        description=(
            "dynamic sampling: drop groups whose rewards are all equal, and sample up to this many rounds to fill the "
            "batch; 0: off"
        ),
    )
    max_prompt_tokens: Positive | None = Field(
        None, description="longer prompts are bad rows; default: what the context leaves"
    )
    staleness: Count = Field(
        0, le=1000, description="steps that sampling may run ahead of training; 0: they take turns, in one thread"
    )
    in_flight: InFlight = Field(
        "recompute", description="of staleness: unfinished rollouts when the student gets new weights"
    )
    mixed_versions: Literal["allow", "refuse"] = Field(
        "allow", description="an interrupted rollout that would continue with newer weights"
    )

    @model_validator(mode="after")
    def _shares(self) -> Rollouts:
        if 0 < self.temperature < 0.01:
            raise ValueError(f"temperature {self.temperature}: 0 is greedy, else at least 0.01")
        if self.data_share + self.teacher_share > 1:
            raise ValueError("data_share + teacher_share is above 1")
        if self.data_share + self.teacher_share + sum(writer.share for writer in self.writers) > 1 + 1e-9:
            raise ValueError("data_share, teacher_share and the shares of writers add up to more than 1")
        idle = [writer.name for number, writer in enumerate(self.writers) if self._idle(number, writer)]
        if idle:
            raise ValueError(
                f"writer {idle[0]} has no share of the prompts: set `share`, or `samples` for some of every group"
            )
        twice = [writer.name for writer in self.writers if writer.share and writer.samples]
        if twice:
            raise ValueError(
                f"writer {twice[0]} has a share of the prompts and samples of every group. Set one of them."
            )
        grouped = sum(writer.samples for writer in self.writers)
        if grouped > self.samples:
            raise ValueError(
                f"writers have {grouped} samples of every group, and samples is {self.samples}. Raise samples, or lower theirs."
            )
        shown = [writer.name for writer in self.writers if writer.samples and writer.shows_more]
        if shown:
            raise ValueError(f"writer {shown[0]} has a share of the prompts, not samples of every group: set `share`")
        resting = [writer.name for writer in self.writers if writer.takes_the_rest]
        if resting:
            raise ValueError(
                f"writers cannot name {resting[0]}: the student answers the remaining prompts. Lower their shares, "
                "and mix a teacher in with teacher_mix"
            )
        if self.teacher_mix and (self.temperature != 1 or self.top_p < 1 or self.top_k):
            raise ValueError(
                "teacher_mix draws from both models without changes: set temperature 1, top_p 1 and top_k 0"
            )
        if not self.staleness and self.in_flight != "recompute":
            raise ValueError(
                f"in_flight {self.in_flight}: with staleness 0 no rollout is unfinished when the weights change"
            )
        if self.contrast and self.samples == 1:
            raise ValueError("contrast compares the samples of a prompt: set samples to 2 or more")
        return self

    @model_validator(mode="after")
    def _moving(self) -> Rollouts:
        if len(self.replaying) > 1:
            raise ValueError("writers name replay twice, and there is one buffer. Name it once")
        if self.share_schedule is not None:
            for mistake in self.share_schedule.mistakes(self.shares, self.replaying):
                raise ValueError(f"share_schedule: {mistake}")
            for number, writer in enumerate(self.writers):
                if writer.samples and f"writers.{number}" in self.ever_positive:
                    raise ValueError(
                        f"share_schedule: writers.{number} ({writer.name}) has samples of every group, so it has no share of the prompts "
                        "that could change. Drop `samples`, or its line"
                    )
        return self

    def _idle(self, number: int, writer: Writer) -> bool:
        return not writer.samples and f"writers.{number}" not in self.ever_positive

    @property
    def shares(self) -> dict[str, float]:
        """The writers' shares as the recipe sets them, by key. The student answers the rest."""
        fixed = {"data_share": self.data_share, "teacher_share": self.teacher_share}
        return {**fixed, **{f"writers.{number}": writer.share for number, writer in enumerate(self.writers)}}

    @property
    def replaying(self) -> list[str]:
        """Keys of the shares that replay."""
        return [f"writers.{number}" for number, writer in enumerate(self.writers) if writer.replays]

    @property
    def ever_positive(self) -> set[str]:
        """Keys of the shares that are above 0 at some step, and `student` if it ever answers the rest."""
        if self.share_schedule is not None:
            found: set[str] = self.share_schedule.ever(self.shares, self.replaying)
            return found
        rest = {"student"} if sum(self.shares.values()) < 1 - 1e-9 else set()
        return {key for key, share in self.shares.items() if share} | rest

    @property
    def mixed_authors(self) -> bool:
        """Whether one answer may have tokens of the student and of a teacher."""
        cut = self.demonstrations is not None and self.demonstrations.cut != "none"
        return self.teacher_prefix is not None or self.takeover is not None or cut

    @property
    def by_sample(self) -> list[Any]:
        """Who writes each sample of a group; None: the writer that the prompt's draw chooses. The others come last."""
        writers: list[Writer] = self.writers
        fixed = [writer for writer in writers for _ in range(writer.samples)]
        return [None] * (self.samples - len(fixed)) + fixed

    @property
    def writers_by_key(self) -> dict[str, Any]:
        """All writers by the key that asks for them, in the order in which a draw chooses them. The student comes last."""
        found = {}
        for name, share in (("data", self.data_share), ("teacher", self.teacher_share)):
            if share or (self.share_schedule is not None and f"{name}_share" in self.ever_positive):
                found[f"{name}_share"] = registry.find("writer", name)(share=share)
        found |= {f"writers.{number}": writer for number, writer in enumerate(self.writers)}
        rest = 1 - self.data_share - self.teacher_share - sum(writer.share for writer in self.writers)
        key, name = ("teacher_mix", "mixed") if self.teacher_mix else ("prompts", "student")
        return {**found, key: registry.find("writer", name)(share=min(rest if rest > 1e-9 else 0.0, 1.0))}

    @property
    def shown_to_student(self) -> list[str]:
        """Keys under which the student reads more than the prompt, with tokens that count as its own."""
        found = [key for key, writer in self.writers_by_key.items() if writer.author == "student" and writer.shows_more]
        return [*found, *(["rescue"] if self.rescue is not None and self.rescue.trained_as == "student" else [])]

    @property
    def everyone(self) -> list[Any]:
        return list(self.writers_by_key.values())


class TeacherPrefix(BaseModel):
    """How many tokens of an answer the teacher writes before the student, from step to step."""

    model_config = SETTINGS
    tokens: Positive = Field(description="of the teacher in the first step")
    to: Count = Field(0, description="of the teacher in the end")
    over: Positive | None = Field(None, description="steps until there; default: all steps of the stage")
    shape: Literal["cosine", "line"] = Field("cosine", description="of the way there")

    def at(self, step: int, steps: int) -> int:
        """
        >>> [TeacherPrefix(tokens=8, over=5, shape=shape).at(2, 100) for shape in ("cosine", "line")]
        [7, 6]
        """
        part = min((step - 1) / max((self.over or steps) - 1, 1), 1.0)
        part = (1 - math.cos(math.pi * part)) / 2 if self.shape == "cosine" else part
        return round(self.tokens + (self.to - self.tokens) * part)


# --- The keys of `rollout.rescue`: prompts that all samples failed are answered again under a view ---


HINT = "hint"  # the field that holds a written hint


class Hint(BaseModel):
    """A text that a model writes during the run after reading more than the student. The view's template names it `{hint}`."""

    model_config = SETTINGS
    by: Literal["teacher", "student"] = Field("teacher", description="the prompt's own teacher, or the student")
    template: str = Field(min_length=1, max_length=100_000, description="the question to it, with {prompt} and {FIELD}")
    max_new_tokens: Positive = 64

    @model_validator(mode="after")
    def _asks(self) -> Hint:
        if HINT in self.question.shows():
            raise ValueError("the template of a hint cannot name {hint}, which is its result")
        return self

    @property
    def question(self) -> Any:
        """A view that fills in the template."""
        return registry.find("view", "template").model_validate({"template": self.template})


class Rescue(BaseModel):
    """Sample again under a view when every sample failed. Right answers replace some of the wrong ones."""

    model_config = SETTINGS
    view: Annotated[Any, Family("view")] = Field(description="what the student reads then")
    replace: Positive = Field(2, le=65_536, description="samples of a group that are sampled again")
    attempts: Positive = Field(5, le=1000, description="until one is right; else the wrong answer stays")
    threshold: float = Field(1.0, description="the least reward of a right answer")
    trained_as: Literal["student", "teacher"] = Field(
        "student", description="as whose tokens the objective's terms (`on`) treat them"
    )
    hint: Hint | None = Field(None, description="written for each failed prompt, before the first attempt")

    @model_validator(mode="after")
    def _hinted(self) -> Rescue:
        named = HINT in self.view.shows()
        if self.hint is not None and not named:
            raise ValueError("a hint is written, and the view does not show it: name {hint} in its template")
        return self

    def mistakes(self, samples: int) -> Iterable[str]:
        if not self.view.reprompts:
            yield f"the view {self.view.name} does not show a prompt that can be answered. Use template, instruction, context or feedback."
        if self.view.as_sampled:
            yield "the view same shows what the failed samples have read. Choose one that shows more."
        yield from self.view.idle_for_student
        if self.replace > samples:
            yield f"replace {self.replace} of rollout.samples {samples}. Lower it."

    def shortest(self, prompt: Prompt) -> Prompt:
        """The prompt with an empty hint, to check lengths in advance."""
        return replace(prompt, fields={**prompt.fields, HINT: " "}) if self.hint is not None else prompt


# --- The keys of `rollout.takeover`: episodes are played again up to a turn, which somebody else takes ---


class Takeover(BaseModel):
    """An episode begins with the turns of one that was played, up to a turn that the teacher or the environment's advice replaces."""

    model_config = SETTINGS
    turn: Literal["wrong"] | Positive = Field(
        "wrong",
        description="wrong: of an episode that failed, the first turn that is wrong; the new episode replaces it once it succeeds. "
        "A number: this turn of every episode, which the new one replaces",
    )
    by: Literal["teacher", "environment"] = Field(
        "teacher",
        description="who finds the wrong turn and corrects it. teacher: the first turn in which its likeliest text differs; "
        "environment: the first that is not in its advice",
    )
    rest: Literal["student", "teacher"] = Field("student", description="who plays the turns after that")
    attempts: Positive = Field(5, le=1000, description="of turn wrong: corrections of one episode, one after the other")
    threshold: float = Field(1.0, description="of turn wrong: the least reward of an episode that succeeded")

    def mistakes(self, stage: Any) -> Iterable[str]:
        if not stage.environments:
            yield "there are no turns without an environment. Set rollout.environment, or use rescue."
        taught = any(kind.role == "teacher" for kind in stage.teachers.values())
        if not taught and "teacher" in (self.by, self.rest):
            yield "there is no teacher to play. Give one, or set by: environment and rest: student."
        if stage.checkpoint.resume == "exact":
            yield "turns are copied and not drawn again, so checkpoint.resume exact has nothing to compare them with. Set it to prefill."
        if self.turn != "wrong" and changed(self) & {"attempts", "threshold"}:
            yield f"attempts and threshold belong to turn: wrong, and turn is {self.turn}. Drop them."
        for environment in stage.environments:
            if self.by == "environment" and not environment.advises:
                yield f"environment {environment.name} has no advice about turns. Set by: teacher."
            if environment.effects == "outside":
                yield f"environment {environment.name} has effects outside, so its turns cannot be played again. Drop the takeover."
            if environment.history == "split":
                yield f"environment {environment.name} has history split, and the turns are copied from whole episodes. Set it to keep."
            if self.turn != "wrong" and self.turn > environment.turns:
                yield f"turn {self.turn} of {environment.turns} turns in environment {environment.name}. Lower it."


# --- The keys of `rollout.experience`: a text about a batch's answers, for teachers to read ---


EXPERIENCE, TRAJECTORIES = "experience", "trajectories"


class Experience(BaseModel):
    """A text that a model writes in every step after reading some of its answers. Views name it `{experience}` (OEL)."""

    model_config = SETTINGS
    by: Literal["teacher", "student"] = Field("student", description="the prompts' own teacher, or the student")
    template: str = Field(
        "{trajectories}\n\nList briefly what can be learnt from these answers for questions of this kind.",
        min_length=1,
        max_length=100_000,
        description="the question to it; {trajectories} are questions, answers and, if there are any, rewards",
    )
    trajectories: Positive = Field(4, le=1000, description="answers that it reads, drawn at random")
    max_new_tokens: Positive = 128

    @model_validator(mode="after")
    def _reads(self) -> Experience:
        if self.question.shows() != {TRAJECTORIES}:
            raise ValueError("the template of an experience names {trajectories}, and no other field")
        return self

    @property
    def question(self) -> Any:
        """A view that fills in the template."""
        return registry.find("view", "template").model_validate({"template": self.template})


# --- Answers of a model at a chat endpoint, in place of those that failed. No torch, no httpx here. ---


PROMPT, KEPT = "prompt", "kept"


class Demonstrations(BaseModel):
    """Which answers are replaced, from where on, and who writes better ones."""

    model_config = SETTINGS
    endpoint: Endpoint | None = Field(
        None, description="`address`, `model`, `token_env`, `price`, …; default: the prompt's own teacher writes"
    )
    template: str = Field(
        "{prompt}",
        min_length=1,
        max_length=100_000,
        description="the question: `{prompt}` is the question, `{kept}` what is kept of the answer, `{FIELD}` a column of its row",
    )
    system: str | None = Field(None, min_length=1, max_length=100_000, description="system message of that question")
    below: float = Field(1.0, description="answers with a smaller reward are replaced")
    by: Annotated[Any, Family("reward")] | None = Field(
        None, description="the reward that decides; default: that of the stage. OVD: kind chat"
    )
    cut: Literal["none", "lines", "tokens"] = Field(
        "none",
        description=(
            "none: the whole answer is replaced. lines, tokens: the steps of an answer; `by` rewards ever longer beginnings, and what "
            "comes before the first step whose beginning is below is kept"
        ),
    )

    @field_validator("template")
    @classmethod
    def _well_formed(cls, value: str) -> str:
        return well_formed(value)

    @model_validator(mode="after")
    def _consistent(self) -> Demonstrations:
        shows = KEPT in fields_of(self.template)
        if self.endpoint is None and changed(self) & {"template", "system"}:
            raise ValueError(
                "template and system are for an endpoint, and the teacher reads the prompt itself: drop them"
            )
        if self.cut != "none" and self.by is None:
            raise ValueError(f"cut: {self.cut} needs `by`, the reward of an answer's beginning: {{kind: chat, …}}, say")
        if self.endpoint is not None and shows != (self.cut != "none"):
            raise ValueError(
                "with cut, the template must show {kept}, after which the endpoint writes on"
                if self.cut != "none"
                else "the template shows {kept}, and without cut nothing is kept: set cut to lines or tokens"
            )
        return self

    def question(self, about: str, prompt: Prompt, kept: str = "") -> ChatQuestion | None:
        """The question; None if the prompt lacks a column that the template shows."""
        values = {**field_texts(prompt.fields), PROMPT: question(prompt), KEPT: kept}
        if any(name not in values for name in fields_of(self.template)):
            return None
        return ChatQuestion(about, filled(self.template, values), self.system)
