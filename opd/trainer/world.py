"""The processes of a run: one by itself, or several ranks that take the same step over the same batch.

Every rank forms weights and denominators from the whole batch, so they are those of one process; what is dealt out is work:
rollouts to sample, to score and to pass through the student. `World` itself is a run in one process, and knows nothing of `torch.distributed`; `trainer.ranks` has the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from opd.errors import RecipeError

if TYPE_CHECKING:  # a recipe is read, and refused, before torch is needed
    import torch

    from opd.config import Stage, Train
    from opd.config.cluster import Cluster
    from opd.models.language_model import LanguageModel
    from opd.models.packing import Pack
    from opd.models.settings import Lora
    from opd.objective.batch import TrainingBatch
    from opd.objective.micro import TokenStatistics
    from opd.runner.interrupts import Interrupts
    from opd.trainer.optimiser import Optimiser
    from opd.types import Rollout, Signal, TokenSampler

    Seen = list[tuple[Pack, TokenStatistics]]

T = TypeVar("T")


class World:
    """One process. `Ranks` overrides what several do differently."""

    rank = 0
    size = 1

    @property
    def leads(self) -> bool:
        """Whether this process owns the run directory: lock, store, rewards, metrics, what is shown."""
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        """Whether the student's weights are spread over the ranks."""
        return False

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

    def share(self, make: Callable[[], T]) -> T:
        """What the leader makes, on every rank."""
        return make()

    def gather(self, part: T) -> list[T]:
        """Every rank's part, in their order, on every rank."""
        return [part]

    def barrier(self) -> None:
        """Nobody goes on before everybody is here."""

    def deal(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """This rank's rollouts of a batch. Groups and pairs stay whole."""
        return list(rollouts)

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

    def optimiser(self, parameters: Mapping[str, torch.nn.Parameter], train: Train) -> Optimiser:
        from opd.trainer.optimiser import Optimiser

        return Optimiser(parameters, train)

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

    def complete(self, batch: TrainingBatch) -> None:
        """The first pass over a batch, of which every rank has taken a part."""

    def collect(self, seen: Seen) -> Seen:
        """Statistics of every rank's micro-batches."""
        return seen

    # Stopping

    def listen(self, interrupts: Interrupts) -> Callable[[], None]:
        """What raises once a stop was asked for; on several ranks, once all know of it."""
        return interrupts.check

    def heed(self, check: Callable[[], None]) -> Callable[[], None]:
        """The same for a sampler that answers for all ranks, which wait for it meanwhile: it may leave by itself (`answering`)."""
        return check

    @contextmanager
    def answering(self) -> Iterator[None]:
        yield

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Nobody leaves in here."""
        yield

    def leave(self) -> None:
        """Raise, where a stop has been heard of."""


def refuse_numbered(name: str, whose: str = "") -> None:
    if ":" in name:
        raise RecipeError(
            f"{whose}device {name!r} with several ranks: each takes the GPU of its own number. Set device: auto, cuda or cpu."
        )
