"""What draws the tokens: the samplers that a recipe can choose. No torch here; it comes with the one that is opened."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from opd.records import TokenSampler
from opd.registry import Choice, Count, Dtype, Family, Positive, StageView

if TYPE_CHECKING:
    from opd.engines.calls import Partner
    from opd.models.language_model import LanguageModel
    from opd.models.settings import Lora

InFlight = Literal["recompute", "keep", "wait"]  # what becomes of unfinished rollouts when newer weights come


class SamplerKind(Choice):
    """`open` makes it of a model, which it takes over: give it an `inference_copy`."""

    family = "sampler"
    key = "engine"
    mixes: ClassVar[bool] = False  # whether a teacher can read along: `rollout.teacher_mix`
    led: ClassVar[bool] = False  # whether one process has it for all ranks, since it works in processes of its own

    takes_turns: ClassVar[bool] = False  # whether requests may come later: `rollout.environment`
    beside_training: ClassVar[bool] = False  # whether it can sample while another thread trains: `rollout.staleness`

    @property
    def beside_trainer(self) -> int:
        """Processes of their own in which the trainer opens it for that; 0: a thread."""
        return 0

    dtype: Dtype | None = Field(None, description="default: the student's")

    @abstractmethod
    def open(
        self, model: LanguageModel, max_length: int, *, merge_stop: tuple[int, ...], partner: Partner | None = None
    ) -> TokenSampler:
        """`max_length`: tokens of the longest sequence. `merge_stop`: ids that are one event, the end."""
        raise NotImplementedError

    def require_mixing(self, models: Sequence[LanguageModel], max_length: int) -> None:
        """Refuse models that cannot read along with each other, before anything is sampled."""

    def manner(self, sampler: TokenSampler) -> str:
        """How one that it opened goes about it, where that is slower than usual."""
        return ""

    def poll_stop(self, sampler: TokenSampler, check: Callable[[], None]) -> None:
        """Where one that it opened waits for somebody else, it calls this now and then, which may raise to end the wait."""

    def close(self, sampler: TokenSampler) -> None:
        """End what one that it opened has running beside this process."""

    def beside(self) -> SamplerKind:
        """What models that do not learn sample with: a teacher that answers or is evaluated."""
        return self

    def takes_adapters(self, config: Any, lora: Lora) -> bool:
        """Whether it gets adapters of a student with this config by themselves, and not merged into its weights."""
        return False

    def adapter_notes(self, config: Any, lora: Lora) -> Iterable[str]:
        """What a plan should say about how a student's adapters get to it."""
        return ()

    def notes(self) -> Iterable[str]:
        """What a plan should say about it."""
        return ()

    def inquire(self) -> Iterable[str]:
        """What it needs beside this process is there, or the error says what is missing; found: what is not there yet, in words."""
        return ()

    @property
    def corrects(self) -> bool:
        """Whether terms that weigh by ratios get a correction: its log-probs are not the trainer's."""
        return False

    def for_batches(self, rollouts: int, model: LanguageModel) -> SamplerKind:
        """What samples batches of so many beside training, where it should not be what the trainer waits for."""
        return self

    def sequences(self) -> int:
        """How many it holds at once, as far as the plan can tell."""
        return 1

    def sized(self, slots: int | None, compiled: bool) -> SamplerKind:
        """With what it leaves open filled in."""
        return self

    def in_words(self) -> list[str]:
        """The sizes of one that leaves none open, for the plan."""
        return []

    def refuse(self, view: StageView) -> Iterable[str]:
        if view.rollout.teacher_mix and not self.mixes:
            yield (
                f"rollout.teacher_mix {view.rollout.teacher_mix}: the sampler {self.name} cannot draw from two models. "
                "Set it to 0."
            )
        if view.rollout.staleness and not self.beside_training:
            yield (
                f"rollout.staleness {view.rollout.staleness}: the sampler {self.name} cannot sample while another thread trains. "
                "Set it to 0."
            )


class BuiltInSampler(SamplerKind):
    """The built-in engine, or one request at a time for models that need it.

    `null`: chosen from the model and the device.
    """

    name = "builtin"
    takes_turns = True
    by_default = True
    mixes = True
    beside_training = True

    slots: Positive | None = Field(None, le=65_536, description="sequences decoded side by side")
    prefill_rows: Positive | None = Field(None, le=65_536, description="rows of one prefill call")
    prefill_chunk: Positive | None = Field(None, description="prompt tokens per prefill row")
    compile: bool | Literal["auto"] = Field(
        "auto",
        description="torch.compile the decode step (GPU; minutes); auto: in runs that are long enough",
    )
    processes: Count = Field(
        0, le=256, description="of rollout.staleness: samplers in processes of their own; 0: one, in a thread"
    )

    @property
    def beside_trainer(self) -> int:
        return self.processes

    def open(
        self, model: LanguageModel, max_length: int, *, merge_stop: tuple[int, ...], partner: Partner | None = None
    ) -> TokenSampler:
        from opd.engines.builtin import open_sampler

        return open_sampler(model, self, max_length, merge_stop=merge_stop, partner=partner)

    def require_mixing(self, models: Sequence[LanguageModel], max_length: int) -> None:
        from opd.engines.builtin import require_slots

        require_slots(models, max_length)

    def manner(self, sampler: TokenSampler) -> str:
        from opd.engines.builtin import Engine, PlainSampler

        assert isinstance(sampler, (Engine, PlainSampler))
        return sampler.manner

    def for_batches(self, rollouts: int, model: LanguageModel) -> SamplerKind:
        from opd.engines.builtin import bound_by_overhead

        if self.processes:
            rollouts = -(-rollouts // self.processes)
        elif rollouts <= 64:
            return self
        if self.slots or self.prefill_rows or not bound_by_overhead(model):
            return self
        return self.model_copy(update={"slots": min(rollouts, 128), "prefill_rows": min(rollouts, 64)})

    def sequences(self) -> int:
        return self.slots or 64

    def sized(self, slots: int | None, compiled: bool) -> SamplerKind:
        slots = slots if self.slots is None else self.slots
        return self.model_copy(update={"slots": slots, "compile": compiled if self.compile == "auto" else self.compile})

    def in_words(self) -> list[str]:
        return [*([f"{self.slots} slots"] if self.slots else []), "compiled" if self.compile else "not compiled"]

    def refuse(self, view: StageView) -> Iterable[str]:
        yield from super().refuse(view)
        if self.compile is True and view.device == "cpu":
            yield "sampler.compile is for CUDA devices, and the device is cpu. Set it to false."
        if self.processes and not view.rollout.staleness:
            yield (
                f"sampler.processes {self.processes}: with rollout.staleness 0 sampling and training take turns, in one process. Set "
                "rollout.staleness to 1 or more, or sampler.processes to 0."
            )


SAMPLERS = Family("sampler", key="engine", default=BuiltInSampler.name)
