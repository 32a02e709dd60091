"""The processes of a run: one by itself, or several ranks that take the same step over the same batch.

Every rank forms weights and denominators from the whole batch, so they are those of one process; what is dealt out is work:
rollouts to sample, to score and to pass through the student. `Ranks` itself is a run in one
process, and knows nothing of `torch.distributed`; `loop.distributed` has the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from opd.common.context import OneProcess, StopRequests
from opd.common.errors import RecipeError

if TYPE_CHECKING:
    import torch

    from opd.loop.learner import Optimiser
    from opd.models.language_model import LanguageModel, Pack
    from opd.models.settings import Lora
    from opd.objective.batch import Batch
    from opd.objective.micro import TokenStatistics
    from opd.recipe import Stage, Train
    from opd.recipe.stage import Cluster
    from opd.records import Signal, TokenSampler

    Seen = list[tuple[Pack, TokenStatistics]]


T = TypeVar("T")


class Ranks(OneProcess):
    """One process. `DistributedRanks` overrides what several do differently."""

    @property
    def title(self) -> str:
        """How many, where there are several."""
        return ""

    def require(self, spec: Stage) -> None:
        """Refuse what these processes cannot do together."""

    def placed(self, spec: Stage) -> Stage:
        """The stage as these processes carry it out."""
        return spec

    def device(self, asked: torch.device, name: str) -> torch.device:
        """Of this process, where the recipe asks for a device by this name."""
        return asked

    # Models

    def load_student(
        self,
        name: str,
        dtype: str,
        device: str,
        revision: str | None,
        cluster: Cluster,
        gradient_checkpointing: bool,
        lora: Lora | None,
    ) -> LanguageModel | None:
        """One of which every rank reads a part; None: it is read whole, and sharded later."""
        return None

    def shard(self, student: LanguageModel, cluster: Cluster) -> LanguageModel:
        """The student to train. Copies of it have to be made before."""
        return student

    def load_spread(self, name: str, dtype: str, device: str, revision: str | None) -> LanguageModel:
        """A frozen model of which every rank reads a part. One process reads it whole."""
        from opd.models import load_model

        return load_model(name, dtype=dtype, device=device, revision=revision)

    def optimiser(self, student: LanguageModel, train: Train) -> Optimiser:
        from opd.loop.learner import Optimiser

        return Optimiser(student.trainable(), train, student.outer())

    def add_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sum the gradients of weights that every rank has whole, so that all have the sum."""

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors of an optimiser as a checkpoint holds them; only the leader's are used."""
        return dict(tensors)

    def opens_sampler(self, led: bool) -> bool:
        """Whether this process opens a sampler of its own for the student. `led`: the leader's answers for all."""
        return True

    def samples_everywhere(self, led: bool) -> bool:
        """Whether every rank opens one."""
        return True

    def sampler(self, sampler: TokenSampler | None, led: bool = False) -> TokenSampler:
        """One that answers for all ranks: each samples its share, or the leader all (`led`), and all see every token."""
        assert sampler is not None
        return sampler

    def student_sampler(
        self,
        sampler: TokenSampler | None,
        led: bool,
        spec: Stage,
        model: LanguageModel,
        max_length: int,
        stop_ids: tuple[int, ...],
    ) -> TokenSampler:
        """What the student samples with; `sampler` is the one that this process has opened for it."""
        return self.sampler(sampler, led)

    # What is known of a batch

    def exchange(self, signals: Mapping[str, Signal], hidden: bool) -> dict[str, Signal]:
        """Signals of all ranks, by rollout. Hidden states stay where they are used."""
        return dict(signals)

    def complete(self, batch: Batch) -> None:
        """The first pass over a batch, of which every rank has taken a part."""

    def collect(self, seen: Seen) -> Seen:
        """Statistics of every rank's micro-batches."""
        return seen

    # Stopping

    def listen(self, interrupts: StopRequests) -> Callable[[], None]:
        """What raises once a stop was asked for; on several ranks, once all know of it."""
        return interrupts.check

    def stop_check(self, check: Callable[[], None]) -> Callable[[], None]:
        """The same for a sampler that answers for all ranks, which wait for it meanwhile: it may leave by itself (`answering`)."""
        return check


def refuse_numbered(name: str, whose: str = "") -> None:
    if ":" in name:
        raise RecipeError(
            f"{whose}device {name!r} with several ranks: each takes the GPU of its own number. Set device: auto, cuda or cpu."
        )
