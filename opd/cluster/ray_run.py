"""`opd run X --on ray`: the parts of a run as workers of a Ray cluster, placed as the recipe's `cluster` says.

The cluster is one of this machine, made for the run, or the one at RAY_ADDRESS, of any number of machines.

The trainer's ranks are the ranks of torchrun: they find each other by the same variables and carry out the same pipeline. One that
dies ends its group, which starts again from the last checkpoint and the store. Samplers and servers are started again by
themselves, and whoever waits for them goes on.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opd.cluster.ray_nodes import look, marked, paths_of, refuse_others, variables_of
from opd.cluster.ray_workers import LOOPBACK, RunArguments, Say, WorkerGroup
from opd.cluster.served_stage import served_models, served_stage
from opd.config import Recipe
from opd.config.cluster import Cluster
from opd.config.refusals import refuse_stage
from opd.config.stage import WEIGHTS
from opd.errors import RecipeError, UserError
from opd.files import SEALS, read_sealed
from opd.remote import to_stderr
from opd.text import first_line

MODE, ADDRESS, TOKEN_FILE = "RAY_AUTH_MODE", "RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH"
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
    """What a recipe asks of a cluster, after refusing what cannot be placed."""

    cluster: Cluster
    dealt: tuple[tuple[str, ...], ...]  # models of frozen teachers, of each server

    @classmethod
    def of(cls, loaded: Recipe) -> RayPlaces:
        cluster = require_ray(loaded)
        models = list(dict.fromkeys(model for stage in loaded.stages for model in served_models(stage)))
        servers = min(cluster.servers, len(models))
        placed = cls(cluster, tuple(tuple(models[number::servers]) for number in range(servers)))
        _dtype(loaded, "cuda" if gpus(loaded) else "cpu")
        for stage in loaded.stages:
            refuse_stage(served_stage(stage, dict.fromkeys(placed.teachers, "http://127.0.0.1:1")), "")
        return placed

    @property
    def teachers(self) -> list[str]:
        return [model for part in self.dealt for model in part]

    @property
    def workers(self) -> int:
        return self.cluster.trainers + self.cluster.samplers + len(self.dealt)


def carry_out_on(
    ray: Any, arguments: RunArguments, loaded: Recipe, placed: RayPlaces, say: Say, *, joined: bool = False
) -> None:
    """`joined`: it may have machines that this process knows nothing of."""
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
                f"{workers} workers with {each} each have no place in this cluster. Lower cluster: in the recipe."
            )
        machines = look_around(ray, group, workers, arguments, loaded) if joined else 1
        token = secrets.token_urlsafe(32)
        started.start_samplers()
        commits = commits_of(placed.teachers, Path(arguments.out))
        started.start_servers(placed.dealt, token, loaded.stages[0].device, dtype, commits)
        where = f" on {machines} machines" if machines > 1 else ""
        say(
            f"ray: {cluster.trainers} trainers, {cluster.samplers} samplers, {len(placed.dealt)} servers of "
            f"{len(placed.teachers)} teachers{where}; {cluster.rewards} CPUs for rewards; run directory {arguments.out}"
        )
        if placed.teachers and any(
            stage.eval.prompts and (stage.eval.teachers or stage.eval.weight_average) for stage in loaded.stages
        ):
            say("ray: teachers and the average of their weights are not evaluated: the weights are with the servers")
        started.train(arguments, token, variables_of(loaded))
    finally:
        started.close()
        ray.util.remove_placement_group(group)


def commits_of(models: Sequence[str], run: Path) -> dict[str, str]:
    """Of those on the hub: what the run began with, or begins with now."""
    from opd.models.identity import hub_commit
    from opd.models.load import locate, require_hub
    from opd.runner.inputs import revision_begun_with

    stages = read_sealed(run / SEALS).get("inputs") or {} if (run / SEALS).exists() else {}
    recorded = {name: facts for inputs in stages.values() for name, facts in inputs.items()}
    found: dict[str, str] = {}
    for model in models:
        if (location := locate(model)).on_hub:
            require_hub(model, location)
            found[model] = revision_begun_with(recorded, model, None) or hub_commit(model, location)
    return found


def look_around(ray: Any, group: Any, places: int, arguments: RunArguments, loaded: Recipe) -> int:
    """Refuse machines that do not see what this one sees. Returns how many get a worker."""
    from ray.exceptions import RayTaskError
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    first = {nodes[place]: place for place in reversed(range(places))}  # one place of each machine
    with marked(Path(arguments.out).parent) as mark:
        files = [arguments.recipe] if Path(arguments.recipe).is_absolute() else []
        paths = [str(mark), arguments.folder, *files, *paths_of(loaded)]
        asked = [
            ray.remote(look)
            .options(num_cpus=0, scheduling_strategy=PlacementGroupSchedulingStrategy(group, place))
            .remote(paths)
            for place in first.values()
        ]
        try:
            refuse_others(look(paths), ray.get(asked), str(mark))
        except RayTaskError as error:
            raise UserError(f"a machine of the cluster cannot run opd: {str(error)[-600:]}") from None
    return len(first)


def require_ray(recipe: Recipe) -> Cluster:
    """Refuse what would be open to others, or cannot be placed, before anything is started."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("--on ray needs the ray package: pip install 'opd[ray]'.")
    if os.environ.get(MODE, "token") != "token":
        raise UserError(
            f"{MODE}={os.environ[MODE]}: without its token anybody who reaches this machine can run programs on it. Unset it."
        )
    address = os.environ.get(ADDRESS, "")
    if address.startswith("ray://"):
        raise UserError(
            f"{ADDRESS}={address}: start the command on a machine of the cluster, and name its head: HOST:6379."
        )
    if address and os.environ.get(MODE) != "token":
        raise UserError(
            f"{ADDRESS}={address} without {MODE}=token: a cluster without a token runs the programs of anybody who reaches it. Start it "
            f"with {MODE}=token on every machine (docs/scale.md), and set the same here."
        )
    path = os.environ.get(TOKEN_FILE)
    if address and path and Path(path).is_file() and Path(path).stat().st_mode & 0o077:
        raise UserError(
            f"{TOKEN_FILE}={path}: others may read this file, and with it run programs. Mend it: chmod 600 {path}"
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


def gpus_of(ray: Any, recipe: Recipe) -> int:
    """Of all machines, where the recipe may use them."""
    return 0 if recipe.stages[0].device == "cpu" else int(ray.cluster_resources().get("GPU", 0))


def _dtype(recipe: Recipe, device: str) -> str:
    """Of teachers that are served: that of the student's weights, as it is where they are loaded beside it."""
    found = {WEIGHTS[stage.train.precision_on(device)] for stage in recipe.stages if served_models(stage)}
    if len(found) > 1:
        raise RecipeError(
            "train.precision: a server keeps a teacher in one precision for the whole run, and the stages differ. Give it once, or "
            "set cluster.servers: 0."
        )
    return next(iter(found), "float32")


@contextmanager
def local_cluster(cpus: int, gpus: int) -> Iterator[Any]:
    """A cluster of this machine alone, for as long as the run lasts: a token that nobody else can read, no dashboard."""
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
    """A cluster that is there already, and stays. Its token is in RAY_AUTH_TOKEN, or in the file that RAY_AUTH_TOKEN_PATH names."""
    import ray
    from ray.exceptions import RayError

    try:
        ray.init(address=address, namespace="opd", log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise UserError(f"{ADDRESS}={address}: no cluster can be joined there ({first_line(error)}).") from None
    try:
        yield ray
    finally:
        ray.shutdown()
