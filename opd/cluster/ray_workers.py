"""The workers of a run on Ray: started in their places, watched, told to stop, and the trainer's group started again."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from opd.cluster.ray_nodes import by_machine, send_signal
from opd.cluster.ray_servers import MOVED
from opd.cluster.served_stage import TOKEN
from opd.config.cluster import Cluster
from opd.errors import RESUME_ME, OpdError, Preempted, RanksLost, Stopped

RESTARTS = 20  # of the trainer's group in one run, and of each sampler and server
STUCK = 5  # of them in a row without a step that is new
STOPS = (signal.SIGINT, signal.SIGTERM)
LOOPBACK = "127.0.0.1"
POLL = 0.5  # seconds
PATIENT = 60.0  # seconds before it is said that a trainer has no place
STOPPED = 5.0  # seconds for servers to end
LOST = -1  # in place of an exit code: the rank was lost, or lost touch with another
WORDS = 600  # characters of why
Say = Callable[[str], None]


class RunArguments(NamedTuple):
    """As the ranks are told them."""

    recipe: str
    overrides: tuple[str, ...]
    out: str
    folder: str  # in which relative paths of `overrides` begin


class WorkerGroup:
    """In the places of one placement group: trainers, then samplers, then servers.

    `host`: where they listen for each other; None: on the addresses of their machines.
    """

    def __init__(
        self, ray: Any, group: Any, each: Mapping[str, int], cluster: Cluster, say: Say, host: str | None = LOOPBACK
    ) -> None:
        self._host = host
        self._ray, self._group, self._cluster, self._say = ray, group, cluster, say
        self._gpus = each.get("GPU", 0)
        self._samplers: list[Any] = []  # Ray ends a worker that nobody holds
        self._servers: list[Server] = []

    def _start(self, kind: type, place: int, *arguments: Any, restarts: int, calls: int = 1) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)
        made = self._ray.remote(kind).options(
            num_cpus=1, num_gpus=self._gpus, max_restarts=restarts, max_concurrency=calls, scheduling_strategy=where
        )
        return made.remote(*arguments)

    def start_samplers(self) -> None:
        from opd.cluster.remote_sampler import SamplerWorker

        first = self._cluster.trainers
        for number in range(self._cluster.samplers):
            self._samplers.append(self._start(SamplerWorker, first + number, restarts=RESTARTS))

    def start_servers(
        self, dealt: Sequence[Sequence[str]], token: str, device: str, dtype: str, commits: Mapping[str, str]
    ) -> None:
        """One for each part of the teachers' models."""
        from opd.cluster.ray_servers import ServerWorker

        first = self._cluster.trainers + self._cluster.samplers
        for number, models in enumerate(dealt):
            arguments = (models, token, device, dtype, self._host, commits)
            worker = self._start(ServerWorker, first + number, *arguments, restarts=RESTARTS, calls=2)
            self._servers.append(Server(worker, models))

    def close(self) -> None:
        """Nobody is started again."""
        over = [server.worker.stop.remote() for server in self._servers]
        over += [server.task for server in self._servers if server.task is not None]
        if over:
            self._ray.wait(over, num_returns=len(over), timeout=STOPPED)
        for worker in (*self._samplers, *(server.worker for server in self._servers)):
            self._ray.kill(worker)

    def train(self, arguments: RunArguments, token: str, variables: Mapping[str, str]) -> None:
        """Until all ranks are through. A rank that is lost takes the others with it, and all begin again."""
        from ray.exceptions import RayActorError

        from opd.cluster.ray_ranks import TrainerWorker

        restarts = Restarts(Path(arguments.out))
        while True:
            nodes = self._nodes()
            order = by_machine(nodes)
            ranks = [self._start(TrainerWorker, place, restarts=0) for place in order]
            try:
                machines = [nodes[place] for place in order]
                started = list(zip(self._when_placed([rank.pid.remote() for rank in ranks]), machines, strict=True))
                places = {model: server.listen(self._ray) for server in self._servers for model in server.models}
                host, port = self._ray.get(ranks[0].meeting_point.remote(self._host))
                common = {**variables, TOKEN: token, "MASTER_ADDR": host, "MASTER_PORT": str(port)}
                pending = [
                    rank.carry_out.remote(
                        {**common, **self._numbers(number, machines)},
                        arguments,
                        self._samplers,
                        places,
                        restarts.done > 0,
                    )
                    for number, rank in enumerate(ranks)
                ]
                self._wait(pending, started, [server.task for server in self._servers])
                return
            except (RanksLost, RayActorError) as error:
                restarts.count(str(error)[:WORDS])
                self._say(f"ray: a trainer was lost; all {len(ranks)} start again ({restarts.done} of {RESTARTS})")
            finally:
                for rank in ranks:
                    self._ray.kill(rank)

    def _nodes(self) -> list[str]:
        """Of the trainers' places; one that went with its machine gets another where there is room."""
        told = False
        while True:
            found = self._ray.util.placement_group_table(self._group)["bundles_to_node_id"]
            nodes = [found.get(place, "") for place in range(self._cluster.trainers)]
            if all(nodes):
                return nodes
            if not told:
                self._say("ray: waiting for room for the trainers")
            told = True
            time.sleep(POLL)

    def _when_placed(self, tasks: Sequence[Any]) -> list[int]:
        _, left = self._ray.wait(tasks, num_returns=len(tasks), timeout=PATIENT)
        if left:
            self._say(f"ray: {len(left)} of {len(tasks)} trainers have no place yet")
        found: list[int] = self._ray.get(tasks)
        return found

    def _numbers(self, rank: int, machines: Sequence[str]) -> dict[str, str]:
        """As torchrun sets them. Where machines have unequally many ranks, groups of a size that fits into each are local."""
        local = machines[:rank].count(machines[rank])
        together = math.gcd(*(machines.count(machine) for machine in set(machines)))
        names = {"RANK": rank, "LOCAL_RANK": 0 if self._gpus else local, "WORLD_SIZE": len(machines)}
        return {name: str(value) for name, value in {**names, "LOCAL_WORLD_SIZE": together}.items()}

    def _wait(self, pending: Sequence[Any], started: Sequence[tuple[int, str]], serving: Sequence[Any]) -> None:
        """`started`: processes and their nodes (two machines may use one number). Ctrl-C and SIGTERM go on to the ranks, which stop at the same point and save; a second Ctrl-C leaves at once."""
        heard: list[int] = []

        def hear(number: int, frame: FrameType | None) -> None:
            if heard and number == signal.SIGINT:
                raise KeyboardInterrupt
            heard.append(number)

        before = {number: signal.signal(number, hear) for number in STOPS}
        told, left, found, watched = False, list(pending), list[tuple[int, str]](), list(serving)
        try:
            while left:
                done, _ = self._ray.wait([*left, *watched], timeout=POLL)
                if heard and not told:
                    told = True
                    self._say(
                        "ray: stopping; a checkpoint is saved first, where that fits into half of checkpoint.grace (press Ctrl-C again "
                        "to quit at once)"
                    )
                    send_signal(self._ray, started, signal.SIGTERM)  # Ray's workers do not hear SIGINT
                for one in done:
                    if one in watched and not heard:
                        raise server_ended(*self._answer(one))
                    if one in watched:  # ranks that save need none
                        watched.remove(one)
                        continue
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


@dataclass
class Server:
    """A worker with some of the teachers, and what it is waited for by."""

    worker: Any
    models: Sequence[str]
    address: str = ""
    task: Any = None

    def listen(self, ray: Any) -> str:
        """Where it listens; one that has moved, or has not begun, is asked where it can."""
        if self.task is None or ray.wait([self.task], timeout=0)[0]:
            self.address = ray.get(self.worker.address.options(max_task_retries=-1).remote())
            self.task = self.worker.wait.options(max_task_retries=-1).remote(self.address)
        return self.address


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


def server_ended(code: int, said: str) -> OpdError:
    """A server whose teachers nobody has any more, or not where the ranks look for them."""
    if code == MOVED:
        return RanksLost(said)
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
