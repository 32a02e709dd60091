"""The trainer's ranks on Ray: as under torchrun, with samplers and teachers in other workers."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from opd.cluster.on_ray import LOST, RunArguments, TeacherPlaces, free_port, node_address, served_stage
from opd.cluster.remote_sampler import RemoteSampler
from opd.engines.shared_sampler import SharedSampler
from opd.loop.distributed import DistributedRanks, joined_ranks
from opd.models.language_model import LanguageModel
from opd.recipe import Stage
from opd.records import TokenSampler

LEASE = 20.0  # seconds between attempts to take a lock that may belong to a lost machine


class RayRanks(DistributedRanks):
    def __init__(
        self, store: Any, rank: int, size: int, local: int, samplers: Sequence[Any], teachers: TeacherPlaces
    ) -> None:
        super().__init__(store, rank, size, local)
        self._samplers, self._places = samplers, teachers

    def placed(self, spec: Stage) -> Stage:
        return served_stage(spec, self._places)

    def opens_sampler(self, led: bool) -> bool:
        return not self._samplers and super().opens_sampler(led)

    def samples_everywhere(self, led: bool) -> bool:
        return not self._samplers and super().samples_everywhere(led)

    def student_sampler(
        self,
        sampler: TokenSampler | None,
        led: bool,
        spec: Stage,
        model: LanguageModel,
        max_length: int,
        stop_ids: tuple[int, ...],
    ) -> TokenSampler:
        """The first ranks have one sampling worker each, and the others wait for its rollouts."""
        if not self._samplers:
            return super().student_sampler(sampler, led, spec, model, max_length, stop_ids)
        facts: Mapping[str, Any] = {
            "model": model.name,
            "revision": spec.student.revision,
            "dtype": spec.sampler.dtype or str(model.dtype).removeprefix("torch."),
            "cuda": model.device.type == "cuda",
            "sampler": spec.sampler.model_dump(mode="json"),
            "threads": spec.threads,
            "max_length": max_length,
            "stop_ids": list(stop_ids),
        }
        own = RemoteSampler(self._samplers[self.rank], facts) if self.rank < len(self._samplers) else None
        return SharedSampler(own, self, len(self._samplers))


class TrainerWorker:
    """One rank, in a process that Ray has started."""

    def pid(self) -> int:
        return os.getpid()

    def meeting_point(self, host: str | None) -> tuple[str, int]:
        """The address where the other ranks find the first one."""
        host = host or node_address()
        return host, free_port(host)

    def carry_out(
        self,
        environment: Mapping[str, str],
        arguments: RunArguments,
        samplers: Sequence[Any],
        teachers: TeacherPlaces,
        again: bool = False,
    ) -> tuple[int, str]:
        """The exit code and message of `opd run X --resume --out DIR`. `again`: after lost ranks."""
        os.environ.update(environment)
        os.chdir(arguments.folder)
        from opd.common.errors import RESUME_ME, AnotherRank, OpdError, RanksLost, RunLocked, Stopped
        from opd.runner.run import run

        recipe, overrides, out, _ = arguments

        def make(store: Any, rank: int, size: int, local: int) -> RayRanks:
            return RayRanks(store, rank, size, local, samplers, teachers)

        try:
            run(recipe, overrides=overrides, out=out, resume=True, join=lambda: joined_ranks(make))
        except RanksLost as error:
            return LOST, str(error)  # all ranks are restarted
        except AnotherRank as error:
            return error.exit_code, ""  # the other rank reports it
        except RunLocked as error:
            time.sleep(LEASE if again else 0)  # a file server releases the lock of a lost machine after a while
            return LOST if again else error.exit_code, str(error)
        except Stopped:
            return RESUME_ME, "stopped; a checkpoint is saved"
        except OpdError as error:
            return error.exit_code, str(error)
        return 0, ""
