"""The samplers that a recipe can choose. torch is only imported when a sampler is opened."""

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

InFlight = Literal["recompute", "keep", "wait"]  # how unfinished rollouts get newer weights


class SamplerKind(Choice):
    """The settings of a sampler. `open` creates it. It takes over the model, so pass an `inference_copy`."""

    family = "sampler"
    key = "engine"
    mixes: ClassVar[bool] = False  # whether it can draw from two models: `rollout.teacher_mix`
    leader_only: ClassVar[bool] = (
        False  # whether only the leader opens it, for all ranks, because it runs in separate processes
    )

    takes_turns: ClassVar[bool] = False  # whether requests may be added during sampling: `rollout.environment`
    alongside_training: ClassVar[bool] = False  # whether it can sample while another thread trains: `rollout.staleness`

    @property
    def processes_alongside(self) -> int:
        """The number of processes in which it samples alongside training; 0: in a thread."""
        return 0

    dtype: Dtype | None = Field(None, description="default: the student's")

    @abstractmethod
    def open(
        self, model: LanguageModel, max_length: int, *, merge_stop: tuple[int, ...], partner: Partner | None = None
    ) -> TokenSampler:
        """`max_length`: tokens of the longest sequence. `merge_stop`: stop ids, which are treated as one event."""
        raise NotImplementedError

    def require_mixing(self, models: Sequence[LanguageModel], max_length: int) -> None:
        """Raise an error for models that cannot decode together, before anything is sampled."""

    def why_slow(self, sampler: TokenSampler) -> str:
        """Why an opened sampler is slower than usual; empty if it is not."""
        return ""

    def poll_stop(self, sampler: TokenSampler, check: Callable[[], None]) -> None:
        """Let an opened sampler call `check` now and then while it waits for others. `check` may raise to end the wait."""

    def close(self, sampler: TokenSampler) -> None:
        """Stop the processes that an opened sampler has started."""

    def for_frozen_models(self) -> SamplerKind:
        """The sampler for models that do not train, such as a teacher that answers or is evaluated."""
        return self

    def takes_adapters(self, config: Any, lora: Lora) -> bool:
        """Whether it takes the adapters of a student with this config separately, instead of merged into the weights."""
        return False

    def adapter_notes(self, config: Any, lora: Lora) -> Iterable[str]:
        """Lines for the plan about how the sampler gets a student's adapters."""
        return ()

    def notes(self) -> Iterable[str]:
        """Lines for the plan."""
        return ()

    def inquire(self) -> Iterable[str]:
        """Check what it needs outside this process. Raises an error for what is missing; returns notes on what may come."""
        return ()

    @property
    def corrects(self) -> bool:
        """Whether ratio-weighted terms get a correction, since its log-probs differ from the trainer's."""
        return False

    def for_batches(self, rollouts: int, model: LanguageModel) -> SamplerKind:
        """These settings adapted to batches of `rollouts` alongside training, so that the trainer does not wait for them."""
        return self

    def sequences(self) -> int:
        """The number of sequences that it holds in memory at once, as an estimate for the plan."""
        return 1

    def sized(self, slots: int | None, compiled: bool) -> SamplerKind:
        """These settings with the open ones filled in."""
        return self

    def in_words(self) -> list[str]:
        """The sizes in words, for the plan. None may be open."""
        return []

    def check(self, view: StageView) -> Iterable[str]:
        if view.rollout.teacher_mix and not self.mixes:
            yield (
                f"rollout.teacher_mix {view.rollout.teacher_mix}: the sampler {self.name} cannot draw from two models. "
                "Set it to 0."
            )
        if view.rollout.staleness and not self.alongside_training:
            yield (
                f"rollout.staleness {view.rollout.staleness}: the sampler {self.name} cannot sample while another thread trains. "
                "Set it to 0."
            )


class BuiltInSampler(SamplerKind):
    """Samples with the built-in engine, or one request at a time for models that do not fit it.

    `null`: chosen from the model and the device.
    """

    name = "builtin"
    takes_turns = True
    by_default = True
    mixes = True
    alongside_training = True

    slots: Positive | None = Field(None, le=65_536, description="sequences decoded in parallel")
    prefill_rows: Positive | None = Field(None, le=65_536, description="rows of one prefill call")
    prefill_chunk: Positive | None = Field(None, description="prompt tokens per prefill row")
    compile: bool | Literal["auto"] = Field(
        "auto",
        description="torch.compile the decode step (GPU; minutes); auto: in runs that are long enough",
    )
    processes: Count = Field(
        0, le=256, description="with rollout.staleness: the number of sampler processes; 0: one sampler in a thread"
    )

    @property
    def processes_alongside(self) -> int:
        return self.processes

    def open(
        self, model: LanguageModel, max_length: int, *, merge_stop: tuple[int, ...], partner: Partner | None = None
    ) -> TokenSampler:
        from opd.engines.builtin import open_sampler

        return open_sampler(model, self, max_length, merge_stop=merge_stop, partner=partner)

    def require_mixing(self, models: Sequence[LanguageModel], max_length: int) -> None:
        from opd.engines.builtin import require_slots

        require_slots(models, max_length)

    def why_slow(self, sampler: TokenSampler) -> str:
        from opd.engines.builtin import Engine, PlainSampler

        assert isinstance(sampler, (Engine, PlainSampler))
        return sampler.why_slow

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

    def check(self, view: StageView) -> Iterable[str]:
        yield from super().check(view)
        if self.compile is True and view.device == "cpu":
            yield "sampler.compile is for CUDA devices, and the device is cpu. Set it to false."
        if self.processes and not view.rollout.staleness:
            yield (
                f"sampler.processes {self.processes}: with rollout.staleness 0 sampling and training take turns, in one process. Set "
                "rollout.staleness to 1 or more, or sampler.processes to 0."
            )


SAMPLERS = Family("sampler", key="engine", default=BuiltInSampler.name)
