"""`opd run X --on ray`: the parts of a run as workers of a Ray cluster on this machine, placed as the recipe's `cluster` says.

The trainer's ranks are the ranks of torchrun: they find each other by the same variables and carry out the same pipeline. One that
dies ends its group, which starts again from the last checkpoint and the store. Samplers and servers are started again by
themselves, and whoever waits for them goes on.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opd.cluster.served_stage import TOKEN, TeacherPlaces, served_models, served_name, served_stage
from opd.config import Recipe
from opd.config.cluster import Cluster
from opd.config.refusals import refuse_stage
from opd.config.stage import WEIGHTS
from opd.errors import OpdError, Preempted, RecipeError, Stopped, UserError
from opd.remote import to_stderr

MODE, ADDRESS = "RAY_AUTH_MODE", "RAY_ADDRESS"
SET_PDEATHSIG = 1
RESTARTS = 20  # of the trainer's group in one run
STOPS = (signal.SIGINT, signal.SIGTERM)
POLL = 0.5  # seconds
PLACED = 120.0  # seconds for the workers to have their places
Say = Callable[[str], None]


class ServerWorker:
    """`opd serve` below a process that Ray has started: it goes with it, and is there again at the same port."""

    def __init__(self, models: Sequence[str], port: int, token: str, device: str, dtype: str) -> None:
        names = [f"{served_name(model)}={model}" for model in models]
        command = [sys.executable, "-m", "opd", "serve", *names, "--port", str(port), "--token-env", TOKEN]
        self._process = subprocess.Popen(
            [*command, "--device", device, "--dtype", dtype],
            env={**os.environ, TOKEN: token},
            preexec_fn=_die_with_parent,  # noqa: PLW1509 — it takes no lock
        )

    def pid(self) -> int:
        return os.getpid()

    def wait(self) -> None:
        """Until the server ends, and this process with it."""
        self._process.wait()
        os._exit(1)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


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
    """Carry it out in `out`; with `resume` it goes on with what has begun there. `whole`: all stages are asked for."""
    out = (Path("runs") / loaded.name if out is None else out).absolute()
    if not whole:
        raise UserError("--only, --from, --until and --reuse are for runs in one process or of torchrun, not for --on.")
    if out.exists() and not resume:
        raise UserError(f"{out} exists. Go on with it (--resume), or choose another directory (--out).")
    cluster = require_ray(loaded)
    models = list(dict.fromkeys(model for stage in loaded.stages for model in served_models(stage)))
    dtype = _dtype(loaded)
    servers = min(cluster.servers, len(models))
    places = {model: f"http://127.0.0.1:{port}" for port, part in _ports(models, servers) for model in part}
    for stage in loaded.stages:
        refuse_stage(served_stage(stage, places), "")
    workers = cluster.trainers + cluster.samplers + servers
    with _local_cluster(workers + cluster.rewards, gpus(loaded)) as ray:
        each = {"CPU": 1, **({"GPU": 1} if gpus(loaded) else {})}
        first = {**each, "CPU": 1 + cluster.rewards}
        group = ray.util.placement_group([first, *[each] * (workers - 1)], strategy="PACK")
        if not group.wait(PLACED):
            raise UserError(
                f"{workers} workers with {each} each have no place on this machine. Lower cluster: in the recipe."
            )
        started = _Group(ray, group, each, cluster, say)
        token = secrets.token_urlsafe(32)
        samplers = started.samplers()
        serving = started.servers(places, token, loaded.stages[0].device, dtype)
        say(
            f"ray: {cluster.trainers} trainers, {len(samplers)} samplers, {len(serving)} servers of "
            f"{len(places)} teachers; {cluster.rewards} CPUs for rewards; run directory {out}"
        )
        if places and any(
            stage.eval.prompts and (stage.eval.teachers or stage.eval.weight_average) for stage in loaded.stages
        ):
            say("ray: teachers and the average of their weights are not evaluated: the weights are with the servers")
        started.train((recipe, tuple(overrides), str(out)), samplers, places, token)


def require_ray(recipe: Recipe) -> Cluster:
    """Refuse what would be open to others, or cannot be placed, before anything is started."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("--on ray needs the ray package: pip install 'opd[ray]'.")
    if os.environ.get(MODE, "token") != "token":
        raise UserError(
            f"{MODE}={os.environ[MODE]}: without its token anybody who reaches this machine can run programs on it. Unset it."
        )
    if os.environ.get(ADDRESS):
        raise UserError(
            f"{ADDRESS} is set: --on ray starts a cluster of its own, on this machine. Unset it; for several machines use torchrun."
        )
    clusters = [stage.cluster for stage in recipe.stages]
    if any(other.placement != clusters[0].placement for other in clusters):
        raise RecipeError(
            "cluster: trainers, samplers, servers and rewards are those of the whole run. Give them once."
        )
    found = clusters[0]
    if found.samplers > found.trainers:
        raise RecipeError(
            f"cluster.samplers {found.samplers}: each is asked by one of the {found.trainers} trainers. Lower it, or raise trainers."
        )
    if found.samplers and any(stage.sampler.led for stage in recipe.stages):
        raise RecipeError("cluster.samplers: a sampler of this engine has processes of its own. Set samplers: 0.")
    return found


def gpus(recipe: Recipe) -> int:
    """Of this machine, where the recipe may use them."""
    if recipe.stages[0].device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count()


def _dtype(recipe: Recipe) -> str:
    """Of teachers that are served: that of the student's weights, as it is where they are loaded beside it."""
    device = "cuda" if gpus(recipe) else "cpu"
    found = {WEIGHTS[stage.train.precision_on(device)] for stage in recipe.stages if served_models(stage)}
    if len(found) > 1:
        raise RecipeError(
            "train.precision: a server keeps a teacher in one precision for the whole run, and the stages differ. Give it once, or "
            "set cluster.servers: 0."
        )
    return next(iter(found), "float32")


def _ports(models: Sequence[str], servers: int) -> list[tuple[int, list[str]]]:
    """Free ones, and the models that are served there, dealt in turn."""
    sockets = [socket.socket() for _ in range(servers)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [(one.getsockname()[1], list(models[number::servers])) for number, one in enumerate(sockets)]
    finally:
        for one in sockets:
            one.close()


@contextmanager
def _local_cluster(cpus: int, gpus: int) -> Iterator[Any]:
    """A cluster of this machine alone, for as long as the run lasts: a token that nobody else can read, no dashboard."""
    with tempfile.TemporaryDirectory(prefix="opd-ray-") as folder:
        path = Path(folder) / "token"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
        os.environ |= {MODE: "token", "RAY_AUTH_TOKEN_PATH": str(path), "RAY_USAGE_STATS_ENABLED": "0"}
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


class _Group:
    """The workers of a run, in the places of one placement group: trainers, then samplers, then servers."""

    def __init__(self, ray: Any, group: Any, each: Mapping[str, int], cluster: Cluster, say: Say) -> None:
        self._ray, self._group, self._cluster, self._say = ray, group, cluster, say
        self._gpus = each.get("GPU", 0)

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
        return [self._start(SamplerWorker, first + number, restarts=-1) for number in range(self._cluster.samplers)]

    def servers(self, places: TeacherPlaces, token: str, device: str, dtype: str) -> list[Any]:
        by_port: dict[int, list[str]] = {}
        for model, address in places.items():
            by_port.setdefault(int(address.rpartition(":")[2]), []).append(model)
        first = self._cluster.trainers + self._cluster.samplers
        found = [
            self._start(ServerWorker, first + number, models, port, token, device, dtype, restarts=-1)
            for number, (port, models) in enumerate(by_port.items())
        ]
        for worker in found:
            worker.wait.options(max_task_retries=-1).remote()
        return found

    def train(
        self, arguments: tuple[str, tuple[str, ...], str], samplers: Sequence[Any], places: TeacherPlaces, token: str
    ) -> None:
        """Until all ranks are through. A rank that is lost takes the others with it, and all begin again."""
        from ray.exceptions import RayActorError

        from opd.cluster.ray_ranks import TrainerWorker

        for attempt in range(RESTARTS + 1):
            ranks = [self._start(TrainerWorker, number, restarts=0) for number in range(self._cluster.trainers)]
            processes = self._ray.get([rank.pid.remote() for rank in ranks])
            pending = [
                rank.carry_out.remote(self._variables(number, token), arguments, samplers, places)
                for number, rank in enumerate(ranks)
            ]
            try:
                self._wait(pending, processes)
                return
            except RayActorError:
                self._say(f"ray: a trainer was lost; all {len(ranks)} start again ({attempt + 1} of {RESTARTS})")
            finally:
                for rank in ranks:
                    self._ray.kill(rank)
        raise UserError(
            f"the trainer's ranks were lost {RESTARTS + 1} times; see log.txt of the run. Go on: opd resume"
        )

    def _wait(self, pending: Sequence[Any], processes: Sequence[int]) -> None:
        """Ctrl-C and SIGTERM go on to the ranks, which stop at the same point and save."""
        from ray.exceptions import RayActorError

        heard: list[int] = []
        before = {number: signal.signal(number, lambda number, frame: heard.append(number)) for number in STOPS}
        told, left, found = False, list(pending), list[tuple[int, str]]()
        try:
            while left:
                done, left = self._ray.wait(left, num_returns=len(left), timeout=POLL)
                if heard and not told:
                    told = True
                    self._say("ray: stopping; a checkpoint is saved first")
                    for process in processes:
                        os.kill(process, signal.SIGTERM)
                found += self._ray.get(done)
                if not heard and (error := why_ended(found, over=not left)) is not None:
                    raise error
        except RayActorError:  # one that has ended while it was told to is not lost
            if not heard:
                raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if heard:
            raise Preempted if heard[0] == signal.SIGTERM else Stopped

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
    """What a rank had to say, with its exit code."""

    def __init__(self, said: str, code: int) -> None:
        super().__init__(said)
        self.exit_code = code


def why_ended(found: Sequence[tuple[int, str]], over: bool) -> WorkerEnded | None:
    """The error that one of the ranks tells of; the others end without a word, often before it. `over`: all have ended."""
    errors = [(code, said) for code, said in found if code]
    for code, said in errors:
        if said:
            return WorkerEnded(said, code)
    if errors and over:
        return WorkerEnded("the trainer's ranks have ended; see log.txt of the run.", errors[0][0])
    return None
