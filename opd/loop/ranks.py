"""The processes of a run: one process, or several ranks that take the same step over the same batch.

Every rank computes weights and denominators from the whole batch, so they equal those of one process. Only work is divided:
rollouts to sample, to score and to pass through the student. `Ranks` itself is a run in one process and does not use
`torch.distributed`; `loop.distributed` has the version for several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from opd.common.context import Peers, StopRequests
from opd.common.errors import RecipeError

if TYPE_CHECKING:
    import torch

    from opd.loop.learner import Optimiser
    from opd.models.language_model import LanguageModel, Pack
    from opd.models.settings import Lora
    from opd.objective.micro import TokenStatistics
    from opd.recipe import Stage, Train
    from opd.recipe.stage import Cluster
    from opd.records import TokenSampler

    Seen = list[tuple[Pack, TokenStatistics]]


T = TypeVar("T")


class Ranks(Peers):
    """One process. `DistributedRanks` overrides what is different with several."""

    @property
    def title(self) -> str:
        """The number of ranks for messages, if there are several."""
        return ""

    def require(self, spec: Stage) -> None:
        """Reject settings that these processes cannot carry out together."""

    def placed(self, spec: Stage) -> Stage:
        """The stage with settings adapted to these processes."""
        return spec

    def device(self, asked: torch.device, name: str) -> torch.device:
        """This process's device, for the device name in the recipe."""
        return asked

    # --- Models ---

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
        """Load a student of which every rank reads a part. None: each rank reads the whole model, and it is sharded later."""
        return None

    def shard(self, student: LanguageModel, cluster: Cluster) -> LanguageModel:
        """The student to train. Copies of it must be made before this call."""
        return student

    def load_sharded_frozen(self, name: str, dtype: str, device: str, revision: str | None) -> LanguageModel:
        """A frozen model of which every rank reads a part. One process reads the whole model."""
        from opd.models import load_model

        return load_model(name, dtype=dtype, device=device, revision=revision)

    def optimiser(self, student: LanguageModel, train: Train) -> Optimiser:
        from opd.loop.learner import Optimiser

        return Optimiser(student.trainable(), train, student.outer())

    def add_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sum the gradients of unsharded weights over ranks, so that all ranks have the sum."""

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """An optimiser's tensors in the form that a checkpoint holds. Only the leader's are used."""
        return dict(tensors)

    def opens_sampler(self, leader_only: bool) -> bool:
        """Whether this process opens its own sampler for the student. `leader_only`: the leader samples for all ranks."""
        return True

    def samples_everywhere(self, leader_only: bool) -> bool:
        """Whether every rank opens a sampler."""
        return True

    def sampler(self, sampler: TokenSampler | None, leader_only: bool = False) -> TokenSampler:
        """A sampler for all ranks: each samples its share, or the leader samples everything (`leader_only`). All ranks see every token."""
        assert sampler is not None
        return sampler

    def student_sampler(
        self,
        sampler: TokenSampler | None,
        leader_only: bool,
        spec: Stage,
        model: LanguageModel,
        max_length: int,
        stop_ids: tuple[int, ...],
    ) -> TokenSampler:
        """What the student samples with. `sampler`: the one that this process has opened for it."""
        return self.sampler(sampler, leader_only)

    # --- Stopping ---

    def listen(self, interrupts: StopRequests) -> Callable[[], None]:
        """A check that raises once a stop is requested; with several ranks, once all of them know."""
        return interrupts.check

    def stop_check(self, check: Callable[[], None]) -> Callable[[], None]:
        """The same check for a sampler that answers for all ranks. It may stop on its own while the others wait (`answering`)."""
        return check


def reject_numbered(name: str, whose: str = "") -> None:
    if ":" in name:
        raise RecipeError(
            f"{whose}device {name!r} with several ranks: each takes the GPU of its own number. Set device: auto, cuda or cpu."
        )
