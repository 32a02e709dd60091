"""The workers of a run on Ray: started in their places, watched, told to stop, and the trainer's group started again."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from opd.cluster.served_stage import TOKEN, TeacherPlaces
from opd.config.cluster import Cluster
from opd.errors import RESUME_ME, OpdError, Preempted, RanksLost, Stopped

RESTARTS = 20  # of the trainer's group in one run, and of each sampler and server
STUCK = 5  # of them in a row without a step that is new
STOPS = (signal.SIGINT, signal.SIGTERM)
POLL = 0.5  # seconds
LOST = -1  # in place of an exit code: the rank was lost, or lost touch with another
WORDS = 600  # characters of why
Say = Callable[[str], None]


class WorkerGroup:
    """In the places of one placement group: trainers, then samplers, then servers."""

    def __init__(self, ray: Any, group: Any, each: Mapping[str, int], cluster: Cluster, say: Say) -> None:
        self._ray, self._group, self._cluster, self._say = ray, group, cluster, say
        self._gpus = each.get("GPU", 0)
        self._workers: list[Any] = []  # samplers and servers: Ray ends a worker that nobody holds

    def _start(self, kind: type, place: int, *arguments: Any, restarts: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)
        made = self._ray.remote(kind).options(
            num_cpus=1, num_gpus=self._gpus, max_restarts=restarts, scheduling_strategy=where
        )
        return made.remote(*arguments)

    def samplers(self) -> list[Any]:
        from opd.cluster.remote_sampler import SamplerWorker

        first = self._cluster.trainers
        found = [
            self._start(SamplerWorker, first + number, restarts=RESTARTS) for number in range(self._cluster.samplers)
        ]
        self._workers += found
        return found

    def servers(self, places: TeacherPlaces, token: str, device: str, dtype: str) -> list[Any]:
        """What each of them has to say when it cannot go on."""
        from opd.cluster.ray_servers import ServerWorker

        by_port: dict[int, list[str]] = {}
        for model, address in places.items():
            by_port.setdefault(int(address.rpartition(":")[2]), []).append(model)
        first = self._cluster.trainers + self._cluster.samplers
        found = [
            self._start(ServerWorker, first + number, models, port, token, device, dtype, restarts=RESTARTS)
            for number, (port, models) in enumerate(by_port.items())
        ]
        self._workers += found
        return [worker.wait.options(max_task_retries=-1).remote() for worker in found]

    def close(self) -> None:
        """Nobody is started again."""
        for worker in self._workers:
            self._ray.kill(worker)

    def train(
        self,
        arguments: tuple[str, tuple[str, ...], str],
        samplers: Sequence[Any],
        serving: Sequence[Any],
        places: TeacherPlaces,
        token: str,
    ) -> None:
        """Until all ranks are through. A rank that is lost takes the others with it, and all begin again."""
        from ray.exceptions import RayActorError

        from opd.cluster.ray_ranks import TrainerWorker

        restarts = Restarts(Path(arguments[2]))
        while True:
            ranks = [self._start(TrainerWorker, number, restarts=0) for number in range(self._cluster.trainers)]
            try:
                processes = self._ray.get([rank.pid.remote() for rank in ranks])
                pending = [
                    rank.carry_out.remote(self._variables(number, token), arguments, samplers, places)
                    for number, rank in enumerate(ranks)
                ]
                self._wait(pending, processes, serving)
                return
            except (RanksLost, RayActorError) as error:
                restarts.count(str(error)[:WORDS])
                self._say(f"ray: a trainer was lost; all {len(ranks)} start again ({restarts.done} of {RESTARTS})")
            finally:
                for rank in ranks:
                    self._ray.kill(rank)

    def _wait(self, pending: Sequence[Any], processes: Sequence[int], serving: Sequence[Any]) -> None:
        """Ctrl-C and SIGTERM go on to the ranks, which stop at the same point and save; a second Ctrl-C leaves at once."""
        heard: list[int] = []

        def hear(number: int, frame: FrameType | None) -> None:
            if heard and number == signal.SIGINT:
                raise KeyboardInterrupt
            heard.append(number)

        before = {number: signal.signal(number, hear) for number in STOPS}
        told, left, found = False, list(pending), list[tuple[int, str]]()
        try:
            while left:
                done, _ = self._ray.wait([*left, *serving], timeout=POLL)
                if heard and not told:
                    told = True
                    self._say(
                        "ray: stopping; a checkpoint is saved first, where that fits into half of checkpoint.grace (press Ctrl-C again "
                        "to quit at once)"
                    )
                    for process in processes:
                        with suppress(ProcessLookupError):  # it has ended by itself
                            os.kill(process, signal.SIGTERM)  # Ray's workers do not hear SIGINT
                for one in done:
                    if one in serving:
                        raise server_ended(*self._answer(one))
                    left.remove(one)
                    found.append(self._answer(one))
                if not heard and (error := why_ended(found, over=not left)) is not None:
                    raise error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if heard:
            wrong = why_ended([(code, said) for code, said in found if code not in (LOST, RESUME_ME)], over=True)
            raise wrong or (Preempted() if heard[0] == signal.SIGTERM else Stopped())

    def _answer(self, task: Any) -> tuple[int, str]:
        """What a task that is over gave: an exit code, and what there is to say. An error that nobody expected is told whole."""
        from ray.exceptions import RayActorError, RayTaskError

        try:
            found: tuple[int, str] = self._ray.get(task)
            return found
        except RayTaskError as error:
            return OpdError.exit_code, str(error)
        except RayActorError as error:
            return LOST, str(error)[:WORDS]

    def _variables(self, rank: int, token: str) -> dict[str, str]:
        if rank == 0:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self._port = free.getsockname()[1]
        size = self._cluster.trainers
        names = {"RANK": rank, "LOCAL_RANK": 0 if self._gpus else rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port), TOKEN: token}
        return {name: str(value) for name, value in names.items()} | where


class WorkerEnded(OpdError):
    """What a worker had to say, with its exit code."""

    def __init__(self, said: str, code: int) -> None:
        super().__init__(said)
        self.exit_code = code


def why_ended(found: Sequence[tuple[int, str]], over: bool) -> OpdError | None:
    """The error that one of the ranks tells of, before that of ranks which were lost by it; the others end without a word,
    often before it. `over`: all have ended.
    """
    errors = [(code, said) for code, said in found if code]
    for code, said in errors:
        if said and code != LOST:
            return WorkerEnded(said, code)
    for code, said in errors:
        if code == LOST:
            return RanksLost(said)
    if errors and over:
        return WorkerEnded("the trainer's ranks have ended; see log.txt of the run.", errors[0][0])
    return None


def server_ended(code: int, said: str) -> WorkerEnded:
    """A server whose teachers nobody has any more."""
    if code == LOST:
        return WorkerEnded(f"a server of teachers was lost {RESTARTS + 1} times: {said}", OpdError.exit_code)
    return WorkerEnded(f"a server of teachers has ended ({code}). It said:\n{said}", code or OpdError.exit_code)


class Restarts:
    """Of the trainer's group. An end that comes again and again at the same step is no accident: it is told."""

    def __init__(self, run: Path) -> None:
        self._metrics = run / "metrics.jsonl"
        self.done = 0
        self._furthest = self._stuck = 0

    def count(self, why: str) -> None:
        steps = self._metrics.read_bytes().count(b"\n") if self._metrics.is_file() else 0
        self.done += 1
        self._stuck = 0 if steps > self._furthest else self._stuck + 1
        self._furthest = max(self._furthest, steps)
        if self._stuck == STUCK:
            raise RanksLost(
                f"the trainer's ranks were lost {STUCK} times in a row, and did not come further than {self._furthest} steps: {why}"
            )
        if self.done > RESTARTS:
            raise RanksLost(f"the trainer's ranks were lost {self.done} times. Go on: opd resume. The last: {why}")
