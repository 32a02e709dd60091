"""`opd run X --on ray`: the parts of a run as workers of a Ray cluster, placed as the recipe's `cluster` says.

The cluster is a local one, made for the run, or the one at RAY_ADDRESS with any number of machines.

The trainer's ranks use the same variables and the same pipeline as under torchrun. If a rank dies, all ranks restart from the last
checkpoint and the store. A sampler or server that dies is restarted alone, and the ranks that wait for it continue.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import importlib.util
import math
import os
import platform
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from opd.common.errors import RESUME_ME, OpdError, Preempted, RanksLost, RecipeError, Stopped, UserError
from opd.common.files import SEALS, read_sealed, this_version
from opd.common.http import to_stderr
from opd.common.text import first_line
from opd.recipe import STAGE_PREFIX, Recipe, Stage
from opd.recipe.checks import require_valid_stage
from opd.recipe.stage import WEIGHTS, Cluster
from opd.teachers.kinds import ModelRef, TeacherKind
from opd.teachers.pool import movable
from opd.teachers.served import ServedTeacher

MODE, ADDRESS, TOKEN_FILE = "RAY_AUTH_MODE", "RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH"
PLACED = 120.0  # seconds until the workers are placed


def run_on_ray(
    recipe: str,
    overrides: Sequence[str],
    loaded: Recipe,
    out: Path | None,
    resume: bool,
    *,
    whole: bool = True,
    say: Say = to_stderr,
) -> None:
    """Run in `out`; with `resume`, continue the run there. `whole`: all stages were requested."""
    out = (Path("runs") / loaded.name if out is None else out).absolute()
    if not whole:
        raise UserError("--only, --from, --until and --reuse work in one process or under torchrun, not with --on.")
    if out.exists() and not resume:
        raise UserError(f"{out} exists. Continue it (--resume), or choose another directory (--out).")
    placed = RayPlaces.of(loaded)
    named = str(Path(recipe).absolute()) if Path(recipe).is_file() else recipe
    arguments = RunArguments(named, tuple(overrides), str(out), os.getcwd())
    address = os.environ.get(ADDRESS)
    with (
        joined_cluster(address)
        if address
        else local_cluster(placed.workers + placed.cluster.rewards, gpus(loaded)) as ray
    ):
        carry_out_on(ray, arguments, loaded, placed, say, joined=bool(address))


@dataclass(frozen=True)
class RayPlaces:
    """The resources that a recipe needs from a cluster."""

    cluster: Cluster
    models_per_server: tuple[tuple[str, ...], ...]  # models of frozen teachers, per server

    @classmethod
    def of(cls, loaded: Recipe) -> RayPlaces:
        cluster = require_ray(loaded)
        models = list(dict.fromkeys(model for stage in loaded.stages for model in served_models(stage)))
        servers = min(cluster.servers, len(models))
        placed = cls(cluster, tuple(tuple(models[number::servers]) for number in range(servers)))
        _dtype(loaded, "cuda" if gpus(loaded) else "cpu")
        for stage in loaded.stages:
            require_valid_stage(served_stage(stage, dict.fromkeys(placed.teachers, "http://127.0.0.1:1")), "")
        return placed

    @property
    def teachers(self) -> list[str]:
        return [model for part in self.models_per_server for model in part]

    @property
    def workers(self) -> int:
        return self.cluster.trainers + self.cluster.samplers + len(self.models_per_server)


def carry_out_on(
    ray: Any, arguments: RunArguments, loaded: Recipe, placed: RayPlaces, say: Say, *, joined: bool = False
) -> None:
    """`joined`: an existing cluster, which may have other machines."""
    cluster, workers = placed.cluster, placed.workers
    devices = gpus(loaded) if not joined else gpus_of(ray, loaded)
    dtype = _dtype(loaded, "cuda" if devices else "cpu")
    each = {"CPU": 1, **({"GPU": 1} if devices else {})}
    first = {**each, "CPU": 1 + cluster.rewards}
    group = ray.util.placement_group([first, *[each] * (workers - 1)], strategy="PACK")
    started = WorkerGroup(ray, group, each, cluster, say, None if joined else LOOPBACK)
    try:
        if not group.wait(PLACED):
            raise UserError(
                f"{workers} workers with {each} each do not fit into this cluster. Lower the numbers of `cluster` in the recipe."
            )
        machines = check_machines(ray, group, workers, arguments, loaded) if joined else 1
        token = secrets.token_urlsafe(32)
        started.start_samplers()
        commits = commits_of(placed.teachers, Path(arguments.out))
        started.start_servers(placed.models_per_server, token, loaded.stages[0].device, dtype, commits)
        where = f" on {machines} machines" if machines > 1 else ""
        say(
            f"ray: {cluster.trainers} trainers, {cluster.samplers} samplers, {len(placed.models_per_server)} servers of "
            f"{len(placed.teachers)} teachers{where}; {cluster.rewards} CPUs for rewards; run directory {arguments.out}"
        )
        if placed.teachers and any(
            stage.eval.prompts and (stage.eval.teachers or stage.eval.weight_average) for stage in loaded.stages
        ):
            say(
                "ray: teachers and the average of their weights are not evaluated, because the weights are on the servers"
            )
        started.train(arguments, token, variables_of(loaded))
    finally:
        started.close()
        ray.util.remove_placement_group(group)


def commits_of(models: Sequence[str], run: Path) -> dict[str, str]:
    """Commits of models on the hub, recorded when the run started or looked up now."""
    from opd.models.load import hub_commit, locate, require_hub
    from opd.runner.inputs import revision_begun_with

    stages = read_sealed(run / SEALS).get("inputs") or {} if (run / SEALS).exists() else {}
    recorded = {name: facts for inputs in stages.values() for name, facts in inputs.items()}
    found: dict[str, str] = {}
    for model in models:
        if (location := locate(model)).on_hub:
            require_hub(model, location)
            found[model] = revision_begun_with(recorded, model, None) or hub_commit(model, location)
    return found


def check_machines(ray: Any, group: Any, places: int, arguments: RunArguments, loaded: Recipe) -> int:
    """Check that all machines see the same files. Returns the number of machines that get a worker."""
    from ray.exceptions import RayTaskError
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    first = {nodes[place]: place for place in reversed(range(places))}  # one worker per machine
    with marked(Path(arguments.out).parent) as mark:
        files = [arguments.recipe] if Path(arguments.recipe).is_absolute() else []
        paths = [str(mark), arguments.folder, *files, *paths_of(loaded)]
        asked = [
            ray.remote(describe_machine)
            .options(num_cpus=0, scheduling_strategy=PlacementGroupSchedulingStrategy(group, place))
            .remote(paths)
            for place in first.values()
        ]
        try:
            require_same_machine(describe_machine(paths), ray.get(asked), str(mark))
        except RayTaskError as error:
            raise UserError(f"a machine of the cluster cannot run opd: {str(error)[-600:]}") from None
    return len(first)


def require_ray(recipe: Recipe) -> Cluster:
    """Reject insecure settings and impossible placements before anything is started."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("--on ray needs the ray package: pip install 'opd[ray]'.")
    if os.environ.get(MODE, "token") != "token":
        raise UserError(
            f"{MODE}={os.environ[MODE]}: without a token anybody who can reach this machine can run programs on it. Unset it."
        )
    address = os.environ.get(ADDRESS, "")
    if address.startswith("ray://"):
        raise UserError(
            f"{ADDRESS}={address}: start the command on a machine of the cluster, and name its head: HOST:6379."
        )
    if address and os.environ.get(MODE) != "token":
        raise UserError(
            f"{ADDRESS}={address} without {MODE}=token: a cluster without a token runs programs for anybody who can reach it. Start it "
            f"with {MODE}=token on every machine (docs/scale.md), and set the same here."
        )
    path = os.environ.get(TOKEN_FILE)
    if address and path and Path(path).is_file() and Path(path).stat().st_mode & 0o077:
        raise UserError(
            f"{TOKEN_FILE}={path}: other users can read this file, and use it to run programs. Fix it: chmod 600 {path}"
        )
    clusters = [stage.cluster for stage in recipe.stages]
    if any(other.placement != clusters[0].placement for other in clusters):
        raise RecipeError(
            "cluster: trainers, samplers, servers and rewards apply to the whole run. Set them at the top level."
        )
    found = clusters[0]
    if found.samplers > found.trainers:
        raise RecipeError(
            f"cluster.samplers {found.samplers}: each serves one of the {found.trainers} trainers. Lower it, or raise trainers."
        )
    if found.samplers and any(stage.sampler.leader_only for stage in recipe.stages):
        raise RecipeError("cluster.samplers: this engine has its own processes. Set samplers: 0.")
    return found


def gpus(recipe: Recipe) -> int:
    """GPUs of this machine, if the recipe may use them."""
    if recipe.stages[0].device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


def gpus_of(ray: Any, recipe: Recipe) -> int:
    """GPUs of all machines, if the recipe may use them."""
    return 0 if recipe.stages[0].device == "cpu" else int(ray.cluster_resources().get("GPU", 0))


def _dtype(recipe: Recipe, device: str) -> str:
    """The dtype of served teachers: that of the student's weights, as without servers."""
    found = {WEIGHTS[stage.train.precision_on(device)] for stage in recipe.stages if served_models(stage)}
    if len(found) > 1:
        raise RecipeError(
            "train.precision: a server has a teacher in one precision for the whole run, but the stages differ. Use one precision, or "
            "set cluster.servers: 0."
        )
    return next(iter(found), "float32")


@contextmanager
def local_cluster(cpus: int, gpus: int) -> Iterator[Any]:
    """A local cluster for this run, with a private token and without a dashboard."""
    with tempfile.TemporaryDirectory(prefix="opd-ray-") as folder:
        path = Path(folder) / "token"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
        os.environ |= {MODE: "token", TOKEN_FILE: str(path), "RAY_USAGE_STATS_ENABLED": "0"}
        os.environ |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_worker_niceness": "0"}
        import ray

        ray.init(
            num_cpus=cpus,
            num_gpus=gpus,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            namespace="opd",
            log_to_driver=False,
            logging_level="ERROR",
        )
        try:
            yield ray
        finally:
            ray.shutdown()


@contextmanager
def joined_cluster(address: str) -> Iterator[Any]:
    """Join an existing cluster. Its token is in RAY_AUTH_TOKEN, or in the file that RAY_AUTH_TOKEN_PATH names."""
    import ray
    from ray.exceptions import RayError

    try:
        ray.init(address=address, namespace="opd", log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise UserError(f"{ADDRESS}={address}: the cluster cannot be joined ({first_line(error)}).") from None
    try:
        yield ray
    finally:
        ray.shutdown()


# Workers: start, watch, stop, and restart the trainer's ranks


RESTARTS = 20  # restarts per run, of the trainer's ranks and of each sampler and server
STUCK = 5  # restarts in a row without a new step
STOPS = (signal.SIGINT, signal.SIGTERM)
LOOPBACK = "127.0.0.1"
POLL = 0.5  # seconds
PATIENT = 60.0  # seconds before a message that a trainer is not placed
STOPPED = 5.0  # seconds for servers to end
LOST = -1  # in place of an exit code: the rank was lost, or lost its connection to another
REASON = 600  # characters of the reason
Say = Callable[[str], None]


class RunArguments(NamedTuple):
    """Arguments of the ranks."""

    recipe: str
    overrides: tuple[str, ...]
    out: str
    folder: str  # base of relative paths in `overrides`


class WorkerGroup:
    """The workers in one placement group: trainers, then samplers, then servers.

    `host`: the address where they listen; None: the addresses of their machines.
    """

    def __init__(
        self, ray: Any, group: Any, each: Mapping[str, int], cluster: Cluster, say: Say, host: str | None = LOOPBACK
    ) -> None:
        self._host = host
        self._ray, self._group, self._cluster, self._say = ray, group, cluster, say
        self._gpus = each.get("GPU", 0)
        self._samplers: list[Any] = []  # Ray ends a worker without references
        self._servers: list[Server] = []

    def _start(self, kind: type, place: int, *arguments: Any, restarts: int, calls: int = 1) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)
        made = self._ray.remote(kind).options(
            num_cpus=1, num_gpus=self._gpus, max_restarts=restarts, max_concurrency=calls, scheduling_strategy=where
        )
        return made.remote(*arguments)

    def start_samplers(self) -> None:
        from opd.cluster.ray_workers import SamplerWorker

        first = self._cluster.trainers
        for number in range(self._cluster.samplers):
            self._samplers.append(self._start(SamplerWorker, first + number, restarts=RESTARTS))

    def start_servers(
        self,
        models_per_server: Sequence[Sequence[str]],
        token: str,
        device: str,
        dtype: str,
        commits: Mapping[str, str],
    ) -> None:
        """One server for each part of the teachers' models."""

        first = self._cluster.trainers + self._cluster.samplers
        for number, models in enumerate(models_per_server):
            arguments = (models, token, device, dtype, self._host, commits)
            worker = self._start(ServerWorker, first + number, *arguments, restarts=RESTARTS, calls=2)
            self._servers.append(Server(worker, models))

    def close(self) -> None:
        """Stop restarting workers."""
        over = [server.worker.stop.remote() for server in self._servers]
        over += [server.task for server in self._servers if server.task is not None]
        if over:
            self._ray.wait(over, num_returns=len(over), timeout=STOPPED)
        for worker in (*self._samplers, *(server.worker for server in self._servers)):
            self._ray.kill(worker)

    def train(self, arguments: RunArguments, token: str, variables: Mapping[str, str]) -> None:
        """Wait until all ranks end. If one is lost, all restart."""
        from ray.exceptions import RayActorError

        from opd.cluster.ray_workers import TrainerWorker

        restarts = Restarts(Path(arguments.out))
        while True:
            nodes = self._nodes()
            order = by_machine(nodes)
            ranks = [self._start(TrainerWorker, place, restarts=0) for place in order]
            try:
                machines = [nodes[place] for place in order]
                started = list(zip(self._when_placed([rank.pid.remote() for rank in ranks]), machines, strict=True))
                places = {model: server.listen(self._ray) for server in self._servers for model in server.models}
                host, port = self._ray.get(ranks[0].rendezvous_address.remote(self._host))
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
                restarts.count(str(error)[:REASON])
                self._say(f"ray: a trainer was lost; restarting all {len(ranks)} ({restarts.done} of {RESTARTS})")
            finally:
                for rank in ranks:
                    self._ray.kill(rank)

    def _nodes(self) -> list[str]:
        """The nodes of the trainers. A trainer of a lost machine is placed on another one."""
        announced = False
        while True:
            found = self._ray.util.placement_group_table(self._group)["bundles_to_node_id"]
            nodes = [found.get(place, "") for place in range(self._cluster.trainers)]
            if all(nodes):
                return nodes
            if not announced:
                self._say("ray: waiting for free resources for the trainers")
            announced = True
            time.sleep(POLL)

    def _when_placed(self, tasks: Sequence[Any]) -> list[int]:
        _, left = self._ray.wait(tasks, num_returns=len(tasks), timeout=PATIENT)
        if left:
            self._say(f"ray: {len(left)} of {len(tasks)} trainers are not placed yet")
        found: list[int] = self._ray.get(tasks)
        return found

    def _numbers(self, rank: int, machines: Sequence[str]) -> dict[str, str]:
        """Environment variables as torchrun sets them. If machines have different numbers of ranks, local groups fit into each."""
        local = machines[:rank].count(machines[rank])
        together = math.gcd(*(machines.count(machine) for machine in set(machines)))
        names = {"RANK": rank, "LOCAL_RANK": 0 if self._gpus else local, "WORLD_SIZE": len(machines)}
        return {name: str(value) for name, value in {**names, "LOCAL_WORLD_SIZE": together}.items()}

    def _wait(self, pending: Sequence[Any], started: Sequence[tuple[int, str]], serving: Sequence[Any]) -> None:
        """Forward Ctrl-C and SIGTERM to the ranks, which stop at the same point and save; a second Ctrl-C quits at once. `started`: processes
        and their nodes, since two machines may use the same process id."""
        received: list[int] = []

        def receive(number: int, frame: FrameType | None) -> None:
            if received and number == signal.SIGINT:
                raise KeyboardInterrupt
            received.append(number)

        before = {number: signal.signal(number, receive) for number in STOPS}
        announced, left, found, watched = False, list(pending), list[tuple[int, str]](), list(serving)
        try:
            while left:
                done, _ = self._ray.wait([*left, *watched], timeout=POLL)
                if received and not announced:
                    announced = True
                    self._say(
                        "ray: stopping; a checkpoint is saved first, if it fits into half of checkpoint.grace (press Ctrl-C again "
                        "to quit at once)"
                    )
                    send_signal(self._ray, started, signal.SIGTERM)  # Ray's workers ignore SIGINT
                for one in done:
                    if one in watched and not received:
                        raise server_ended(*self._answer(one))
                    if one in watched:  # ranks that save need no samplers
                        watched.remove(one)
                        continue
                    left.remove(one)
                    found.append(self._answer(one))
                if not received and (error := why_ended(found, over=not left)) is not None:
                    raise error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if received:
            wrong = why_ended([(code, message) for code, message in found if code not in (LOST, RESUME_ME)], over=True)
            raise wrong or (Preempted() if received[0] == signal.SIGTERM else Stopped())

    def _answer(self, task: Any) -> tuple[int, str]:
        """The exit code and message of a finished task. An unexpected error is raised."""
        from ray.exceptions import RayActorError, RayTaskError

        try:
            found: tuple[int, str] = self._ray.get(task)
            return found
        except RayTaskError as error:
            return OpdError.exit_code, str(error)
        except RayActorError as error:
            return LOST, str(error)[:REASON]


@dataclass
class Server:
    """A worker with some of the teachers, and the task that waits for it."""

    worker: Any
    models: Sequence[str]
    address: str = ""
    task: Any = None

    def listen(self, ray: Any) -> str:
        """Its address. A worker that has moved or not started yet is asked for a free one."""
        if self.task is None or ray.wait([self.task], timeout=0)[0]:
            self.address = ray.get(self.worker.address.options(max_task_retries=-1).remote())
            self.task = self.worker.wait.options(max_task_retries=-1).remote(self.address)
        return self.address


class WorkerEnded(OpdError):
    """The message of a worker, with its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code


def why_ended(found: Sequence[tuple[int, str]], over: bool) -> OpdError | None:
    """The error that a rank reports, rather than that of ranks which were lost because of it. Other ranks end without a message,
    often earlier. `over`: all have ended.
    """
    errors = [(code, message) for code, message in found if code]
    for code, message in errors:
        if message and code != LOST:
            return WorkerEnded(message, code)
    for code, message in errors:
        if code == LOST:
            return RanksLost(message)
    if errors and over:
        return WorkerEnded("the trainer's ranks have ended; see log.txt of the run.", errors[0][0])
    return None


def server_ended(code: int, message: str) -> OpdError:
    """Raise if a server has ended for good."""
    if code == MOVED:
        return RanksLost(message)
    if code == LOST:
        return WorkerEnded(f"a server of teachers was lost {RESTARTS + 1} times: {message}", OpdError.exit_code)
    return WorkerEnded(f"a server of teachers has ended ({code}). Its message:\n{message}", code or OpdError.exit_code)


class Restarts:
    """Restarts of the trainer's ranks. Repeated failures at the same step are an error."""

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
                f"the trainer's ranks were lost {STUCK} times in a row, without getting past {self._furthest} steps: {why}"
            )
        if self.done > RESTARTS:
            raise RanksLost(
                f"the trainer's ranks were lost {self.done} times. Continue: opd resume. The last reason: {why}"
            )


# Machines: only the recipe is sent to them, so files, models and the run directory must have the same paths on all of them. This is
# checked before anything is started.


PACKAGES = ("torch", "transformers")
MOST_FILES = 10_000  # files of a directory that are compared


class Machine(NamedTuple):
    """A machine, as one of its processes sees it."""

    name: str
    versions: dict[str, str]
    seen: dict[str, str]  # path -> description of the file; empty: no such path


def node_address() -> str:
    """The address of this machine, as other machines reach it."""
    import ray

    found: str = ray.util.get_node_ip_address()
    return found


def free_port(host: str) -> int:
    """A free port above Ray's own and below the ephemeral ones, which a connection might take first."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
            try:
                one.bind((host, port))
                return port
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise


def describe_machine(paths: Sequence[str]) -> Machine:
    """Runs on each machine."""
    versions = {"Python": platform.python_version(), "opd": this_version()} | {name: version(name) for name in PACKAGES}
    return Machine(socket.gethostname(), versions, {path: _fingerprint(Path(path)) for path in paths})


def _fingerprint(path: Path) -> str:
    """A short file's content; the names of files in a directory, and for a model their sizes, because files of other directories may
    grow. Not their times, because copies have different ones.
    """
    if path.is_dir():
        files, model = sorted(path.iterdir())[:MOST_FILES], (path / "config.json").is_file()
        listed = "\n".join(f"{file.name} {file.stat().st_size if model and file.is_file() else ''}" for file in files)
        return f"directory {hashlib.sha256(listed.encode()).hexdigest()[:16]}"
    if not path.is_file():
        return ""
    size = path.stat().st_size
    return f"file {size} {hashlib.sha256(path.read_bytes()).hexdigest()[:16] if size < 1 << 20 else ''}"


def paths_of(recipe: Recipe) -> list[str]:
    """Every path in a recipe. They are absolute here."""
    found = dict.fromkeys(text for text in _texts(recipe.model_dump(mode="json")) if os.path.isabs(text))
    return [
        text for text in found if os.path.exists(text)
    ]  # `Path.exists` would raise for a long text that begins with /


def variables_of(recipe: Recipe) -> dict[str, str]:
    """Environment variables that the recipe names (`token_env: NAME`)."""
    names = {text for key, text in _pairs(recipe.model_dump(mode="json")) if key.endswith("_env")}
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(item)


def _pairs(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        yield from ((key, item) for key, item in value.items() if isinstance(item, str))
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _pairs(item)


@contextmanager
def marked(directory: Path) -> Iterator[Path]:
    """A file in the run directory, to see whether other machines have the same directory."""
    directory.mkdir(parents=True, exist_ok=True)
    mark = directory / f".opd-{secrets.token_hex(8)}"
    with mark.open("x", encoding="ascii") as file:
        file.write(secrets.token_hex(16))
    try:
        yield mark
    finally:
        with suppress(FileNotFoundError):
            mark.unlink()


def require_same_machine(mine: Machine, others: Sequence[Machine], mark: str) -> None:
    """Raise an error that names the machine and the path or package."""
    for other in others:
        for path, found in mine.seen.items():
            if other.seen.get(path) == found:
                continue
            what = f"{path} {'differs' if other.seen.get(path) else 'does not exist'} there"
            if path == mark:
                what = f"{Path(path).parent} is not the same directory there"
            raise UserError(
                f"machine {other.name}: {what}. The run directory, the working directory and everything that the recipe names "
                "by a path must be at the same path on every machine of the cluster: put them on a shared file system."
            )
        for package, wanted in mine.versions.items():
            if other.versions.get(package) != wanted:
                raise UserError(
                    f"machine {other.name} has {package} {other.versions.get(package)}, and this one {wanted}. Install the same everywhere."
                )


def by_machine(nodes: Sequence[str]) -> list[int]:
    """Order places by machine, with the first place first."""
    first = {node: place for place, node in reversed(list(enumerate(nodes)))}
    return sorted(range(len(nodes)), key=lambda place: (first[nodes[place]], place))


def send_signal(ray: Any, where: Sequence[tuple[int, str]], number: signal.Signals) -> None:
    """Send a signal. `where`: processes and their nodes. Processes of other machines get it from a task there."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    for process, node in where:
        if node == here:
            _signal_here(process, int(number))
        else:
            affinity = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            ray.remote(_signal_here).options(num_cpus=0, scheduling_strategy=affinity).remote(process, int(number))


def _signal_here(process: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has already ended
        os.kill(process, number)


# Servers of teachers: `opd serve` as a child of a Ray worker. If it dies, Ray restarts both at the same address.


SET_PDEATHSIG = 1
STARTS = 2  # starts of a server, whose port may still be in use by one that was killed
PAUSE = 1.0  # seconds between them
LAST_WORDS = 4000  # last bytes of its output
MOVED = -2  # in place of an exit code: this worker was restarted on another machine


class ServerWorker:
    """Handles two calls at once, because `wait` lasts as long as the server. `host`: where it listens; None: the machine's address.
    `commits`: of models on the hub.
    """

    def __init__(
        self,
        models: Sequence[str],
        token: str,
        device: str,
        dtype: str,
        host: str | None = None,
        commits: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._host = host
        names = [f"{served_name(model)}={model}" for model in models]
        self._command = [sys.executable, "-m", "opd", "serve", *names, "--token-env", TOKEN]
        self._command += ["--device", device, "--dtype", dtype]
        for model in models:
            if model in commits:
                self._command += ["--revision", f"{served_name(model)}={commits[model]}"]
        self._environment = {**os.environ, TOKEN: token}
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 — open while this process lives
        self._process: subprocess.Popen[bytes] | None = None
        self._over = False

    def pid(self) -> int:
        return os.getpid()

    def address(self) -> str:
        """A free address to listen on."""
        host = self._host or node_address()
        return f"http://{f'[{host}]' if ':' in host else host}:{free_port(host)}"

    def wait(self, address: str) -> tuple[int, str]:
        """Run the server until it ends, and return its exit code and last output. If it is killed, this process ends too, and Ray
        restarts both at the same address.
        """
        place = urlsplit(address)
        if place.hostname != (here := self._host or node_address()):
            return MOVED, f"a server of teachers has moved from {place.hostname} to {here}"
        command, code = [*self._command, "--host", str(place.hostname), "--port", str(place.port)], 0
        for start in range(STARTS):
            if start:
                time.sleep(PAUSE)
            self._process = subprocess.Popen(
                command,
                env=self._environment,
                stderr=self._said,
                preexec_fn=partial(_die_with, os.getpid()),  # noqa: PLW1509 — it takes no lock
            )
            code = self._process.wait()
            if self._over:
                return 0, ""
            if code < 0:
                os._exit(1)
        self._said.seek(max(self._said.seek(0, os.SEEK_END) - LAST_WORDS, 0))
        return code, self._said.read().decode(errors="replace").strip()

    def stop(self) -> None:
        """Stop the server."""
        self._over = True
        if self._process is not None:
            self._process.kill()


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died earlier
        os._exit(1)


# Stages with served teachers: the recipe stays the same, and the ranks ask the servers over HTTP


TOKEN = "OPD_CLUSTER_TOKEN"  # the variable that holds the token of all servers of a run
TeacherPlaces = Mapping[str, str]  # model -> address


def served_models(stage: Stage) -> list[str]:
    """Models that a server can load as the recipe names them."""
    return [ref.model for ref in movable(stage.teachers) if _plain(ref)]


def _plain(ref: ModelRef) -> bool:
    return ref == ModelRef(ref.model) and not ref.model.startswith(STAGE_PREFIX)


def served_name(model: str) -> str:
    """A unique name for a model on a server."""
    letters = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in model).strip("-")
    return f"{letters[-80:]}-{hashlib.sha256(model.encode()).hexdigest()[:8]}"


def served_stage(stage: Stage, places: TeacherPlaces) -> Stage:
    """The stage without evaluations that need the teachers' weights, which are on the servers."""
    teachers = {name: _served(kind, places) for name, kind in stage.teachers.items()}
    if teachers == stage.teachers:
        return stage
    evaluated = stage.eval.model_copy(update={"teachers": False, "weight_average": False})
    return stage.model_copy(update={"teachers": teachers, "eval": evaluated})


def _served(kind: TeacherKind, places: TeacherPlaces) -> TeacherKind:
    refs = kind.reads()
    if not kind.can_wait or len(refs) != 1 or not _plain(refs[0]) or refs[0].model not in places:
        return kind
    model = refs[0].model
    same = ("role", "domains", "view", "temperature", "batch_tokens")
    kept = {key: value for key, value in kind if key in same and value is not None}
    return ServedTeacher(address=places[model], model=served_name(model), token_env=TOKEN, **kept)
