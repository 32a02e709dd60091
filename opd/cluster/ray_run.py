"""`opd run X --on ray`: the parts of a run as workers of a Ray cluster on this machine, placed as the recipe's `cluster` says.

The trainer's ranks are the ranks of torchrun: they find each other by the same variables and carry out the same pipeline. One that
dies ends its group, which starts again from the last checkpoint and the store. Samplers and servers are started again by
themselves, and whoever waits for them goes on.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.cluster.ray_workers import Say, WorkerGroup
from opd.cluster.served_stage import TeacherPlaces, served_models, served_stage
from opd.config import Recipe
from opd.config.cluster import Cluster
from opd.config.refusals import refuse_stage
from opd.config.stage import WEIGHTS
from opd.errors import RecipeError, UserError
from opd.remote import to_stderr

MODE, ADDRESS = "RAY_AUTH_MODE", "RAY_ADDRESS"
PLACED = 120.0  # seconds for the workers to have their places


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
    placed = RayPlaces.of(loaded)
    with local_cluster(placed.workers + placed.cluster.rewards, gpus(loaded)) as ray:
        carry_out_on(ray, (recipe, tuple(overrides), str(out)), loaded, placed, say)


@dataclass(frozen=True)
class RayPlaces:
    """What a recipe asks of a cluster, after refusing what cannot be placed."""

    cluster: Cluster
    teachers: TeacherPlaces
    servers: int
    dtype: str  # of served teachers

    @classmethod
    def of(cls, loaded: Recipe) -> RayPlaces:
        cluster = require_ray(loaded)
        models = list(dict.fromkeys(model for stage in loaded.stages for model in served_models(stage)))
        servers = min(cluster.servers, len(models))
        teachers = {model: f"http://127.0.0.1:{port}" for port, part in _ports(models, servers) for model in part}
        for stage in loaded.stages:
            refuse_stage(served_stage(stage, teachers), "")
        return cls(cluster, teachers, servers, _dtype(loaded))

    @property
    def workers(self) -> int:
        return self.cluster.trainers + self.cluster.samplers + self.servers


def carry_out_on(
    ray: Any, arguments: tuple[str, tuple[str, ...], str], loaded: Recipe, placed: RayPlaces, say: Say
) -> None:
    """`arguments`: the recipe, overrides and the run directory, as the ranks are told them."""
    cluster, workers = placed.cluster, placed.workers
    each = {"CPU": 1, **({"GPU": 1} if gpus(loaded) else {})}
    first = {**each, "CPU": 1 + cluster.rewards}
    group = ray.util.placement_group([first, *[each] * (workers - 1)], strategy="PACK")
    started = WorkerGroup(ray, group, each, cluster, say)
    try:
        if not group.wait(PLACED):
            raise UserError(
                f"{workers} workers with {each} each have no place on this machine. Lower cluster: in the recipe."
            )
        token = secrets.token_urlsafe(32)
        samplers = started.samplers()
        serving = started.servers(placed.teachers, token, loaded.stages[0].device, placed.dtype)
        say(
            f"ray: {cluster.trainers} trainers, {len(samplers)} samplers, {len(serving)} servers of "
            f"{len(placed.teachers)} teachers; {cluster.rewards} CPUs for rewards; run directory {arguments[2]}"
        )
        if placed.teachers and any(
            stage.eval.prompts and (stage.eval.teachers or stage.eval.weight_average) for stage in loaded.stages
        ):
            say("ray: teachers and the average of their weights are not evaluated: the weights are with the servers")
        started.train(arguments, samplers, serving, placed.teachers, token)
    finally:
        started.close()
        ray.util.remove_placement_group(group)


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
def local_cluster(cpus: int, gpus: int) -> Iterator[Any]:
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
