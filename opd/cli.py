"""The command line: parses and delegates, nothing else. Heavy imports wait until a command needs them."""

from __future__ import annotations

import json
import logging
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opd.commands import models, recipes, store
from opd.diagnose.command import diagnose_command
from opd.errors import RESUME_ME, AnotherRank, OpdError, Preempted, Stopped
from opd.report.commands import add_commands
from opd.text import PlainFormatter, plain, printable

if TYPE_CHECKING:
    from opd.config import Recipe

app = typer.Typer(
    name="opd",
    no_args_is_help=True,
    add_completion=False,
    help="On-policy distillation: the student samples, the teachers score every token.",
)
app.add_typer(recipes, name="recipes")
app.add_typer(models, name="models")
app.add_typer(store, name="store")
add_commands(app)
app.command("diagnose")(diagnose_command)
cluster = typer.Typer(no_args_is_help=True, help="Many GPUs.")
app.add_typer(cluster, name="cluster")

STOPPED = 130  # as a shell reports Ctrl-C
ERROR = 8000  # characters of a message
LARGEST = 2**64 - 1  # seed


def _version(asked: bool) -> None:
    if asked:
        from opd.version import this_version

        print(f"opd {this_version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """On-policy distillation: the student samples, the teachers score every token."""


def main() -> None:
    """A user's mistake is one clear message and exit code 2; a traceback means a bug."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PlainFormatter())
    try:
        app()
    except Preempted:
        sys.exit(RESUME_ME)
    except Stopped:
        sys.exit(STOPPED)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(STOPPED)
    except BrokenPipeError:  # `opd schema | head`
        sys.stdout = None
        sys.exit(1)
    except AnotherRank as error:
        sys.exit(error.exit_code)
    except OpdError as error:
        print(f"opd: {printable(error, ERROR)}", file=sys.stderr)
        sys.exit(error.exit_code)


Only = Annotated[str | None, typer.Option("--only", metavar="STAGE", help="Carry out this stage alone.")]
From = Annotated[str | None, typer.Option("--from", metavar="STAGE", help="Begin with this stage.")]
Until = Annotated[str | None, typer.Option("--until", metavar="STAGE", help="End behind this stage.")]


class Place(StrEnum):
    ray = "ray"


On = Annotated[Place | None, typer.Option(help="ray: trainers, samplers and servers as the recipe's `cluster` says.")]
Again = Annotated[
    bool,
    typer.Option(
        "--resume", help="Use exactly this directory, and resume a run that was started there: for job scripts."
    ),
]


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="A .yaml file, or the name of a shipped recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="For example train.steps=50")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Run directory; default runs/NAME. One that is taken becomes NAME-2, never overwritten."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved recipe and the plan, and stop.")
    ] = False,
    resume: Again = False,
    on: On = None,
    only: Only = None,
    start: From = None,
    until: Until = None,
    reuse: Annotated[
        list[Path] | None,
        typer.Option(help="A run whose finished stages are used again where nothing has changed; repeat for several."),
    ] = None,
) -> None:
    """Train: from a recipe to a model."""
    from opd.config import load_recipe
    from opd.config.graph import ChosenStages
    from opd.config.names import check_output
    from opd.runner.run import launched

    if dry_run or not launched():  # before torch is needed; ranks tell of a mistake together
        loaded = load_recipe(recipe, overrides or ())
        ChosenStages(only, start, until).require(loaded, elsewhere=resume or bool(reuse))
        check_output(Path("runs") / loaded.name if out is None else out)
    if dry_run:
        _show_plan(loaded)
        return
    if on is not None:
        from opd.cluster.ray_run import run_on_ray

        run_on_ray(recipe, overrides or (), loaded, out, resume, whole=not (only or start or until or reuse))
        return
    from rich.console import Console

    from opd.runner.run import run as carry_out

    carry_out(
        recipe,
        overrides=overrides or (),
        out=out,
        resume=resume,
        only=only,
        start=start,
        until=until,
        reuse=reuse or (),
        quiet=False,
        console=Console(),
    )


class Mode(StrEnum):
    prefill = "prefill"
    exact = "exact"


def _show_plan(recipe: Recipe) -> None:
    from opd.runner.plan import make_plan

    plans = make_plan(recipe)
    print(printable(recipe.to_yaml()))
    for plan in plans:
        print("\n".join(map(plain, plan.lines())))


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(help="A run directory, for example runs/quickstart")],
    mode: Annotated[
        Mode | None,
        typer.Option(help="How unfinished rollouts are continued; default: the recipe's checkpoint.resume."),
    ] = None,
    only: Only = None,
    start: From = None,
    until: Until = None,
) -> None:
    """Continue a run that was killed, stopped, preempted or ran out of disk."""
    from opd.runner.run import resume as go_on

    go_on(run, mode=mode.value if mode else None, only=only, start=start, until=until, quiet=False)


@app.command()
def graph(
    recipe: Annotated[str, typer.Argument(help="A .yaml file, or the name of a shipped recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
) -> None:
    """Draw the stages of a recipe and what they take from each other, in Mermaid."""
    from opd.config import load_recipe
    from opd.config.graph import mermaid

    print(printable(mermaid(load_recipe(recipe, overrides or ()))), end="")


def _model(name: str) -> str:
    """A model, or the last checkpoint of the run directory that is named in its place, which is said."""
    from opd.runner.directory import model_named

    found = model_named(name)
    if found != name:
        print(plain(f"{name} is a run: its last checkpoint is {found}"), file=sys.stderr)
    return found


class Split(StrEnum):
    all = "all"
    heldout = "heldout"
    train = "train"


@app.command("eval")
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="A run directory (its last checkpoint), a model directory, hub id, .gguf file, smol or tiny/NAME."
        ),
    ],
    prompts: Annotated[list[str], typer.Option(help="A file, a folder, a task or a dataset; repeat for several.")],
    k: Annotated[int, typer.Option(min=0, max=65_536, help="Samples per prompt for pass@k; 0: greedy only.")] = 0,
    n: Annotated[
        int | None,
        typer.Option(min=1, max=1_000_000, help="Prompts per domain; default: all of a file, 200 of a task."),
    ] = None,
    split: Annotated[
        Split | None, typer.Option(help="Which prompts; default: all of a file, a task's held-out ones.")
    ] = None,
    rewards: Annotated[
        str | None, typer.Option(help="How answers are rewarded, as in a recipe: a kind, YAML, or a file with it.")
    ] = None,
    plugins: Annotated[
        list[str] | None,
        typer.Option(
            "--plugin", metavar="FILE.py|MODULE", help="With rewards or sources of your own; repeat for several."
        ),
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0.01, help="Of the samples of --k; default 1.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    seed: Annotated[int, typer.Option(min=0, max=LARGEST)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure pass@1 and pass@k of a model on a file, a dataset or a task."""
    from opd.files import json_text
    from opd.runner.evaluate import evaluate_model

    model = _model(model)
    measured = evaluate_model(
        model,
        prompts,
        k=k,
        count=n,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        device=device,
        seed=seed,
        split=split.value if split else None,
        rewards=rewards,
        plugins=plugins or (),
    )
    for note in measured.notes:
        print(note, file=sys.stderr)
    if as_json:
        print(json_text(measured.to_json(), indent=1))
        return
    from rich.console import Console

    from opd.runner.evaluate import measures_table

    Console().print(measures_table(model, measured.domains, measured.what))


@app.command()
def chat(
    model: Annotated[
        str,
        typer.Argument(
            help="A run directory (its last checkpoint), a model directory, hub id, .gguf file, smol or tiny/NAME."
        ),
    ],
    against: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A teacher, who scores the answer as it is written, and answers too."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 1.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    seed: Annotated[int, typer.Option(min=0, max=LARGEST)] = 0,
) -> None:
    """Ask a model, and a teacher against it; one question per line, the end of the input ends it."""
    from rich.console import Console

    from opd.runner.checks import pick_device
    from opd.runner.talk import Talk, converse, questions

    model, against = _model(model), None if against is None else _model(against)
    place, said = str(pick_device(device)), {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    talk = Talk(model, against, console=Console(highlight=False), device=place, **said)  # type: ignore[arg-type]
    converse(talk, questions(lambda: input("you> " if sys.stdin.isatty() else "")))


class Precision(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


@app.command()
def serve(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL|NAME=MODEL...", help="Models that score for runs elsewhere.")
    ],
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=DIR", help="An adapter directory; repeat for several.")
    ] = None,
    revision: Annotated[
        list[str] | None, typer.Option(metavar="NAME=REVISION", help="Of a model on the hub; default: its newest.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; anything but loopback is seen by others.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0: any that is free.")] = 8200,
    token_env: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The variable that holds the token; default: one is made and printed."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    dtype: Annotated[Precision | None, typer.Option(help="Default: float32 on a CPU, bfloat16 on a GPU.")] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one forward pass.")] = 8192,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one request.")] = 131_072,
    max_sequences: Annotated[int, typer.Option(min=1, help="Texts in one request.")] = 4096,
    max_bytes: Annotated[int, typer.Option(min=1, help="Bytes of one request.")] = 16 << 20,
    waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are told to come back.")] = 4096,
    request_seconds: Annotated[float, typer.Option(min=0.1, help="In which a request has to have come in.")] = 30.0,
    drain_seconds: Annotated[float, typer.Option(min=0.0, help="For the last answers after SIGTERM.")] = 60.0,
) -> None:
    """Serve models as teachers: hidden states, log-probs and likeliest ids over HTTP."""
    from opd.remote import to_stderr
    from opd.serve.server import ServeSettings
    from opd.serve.server import serve as start
    from opd.teachers.wire import RequestLimits

    limits = RequestLimits(max_bytes, max_tokens, max_sequences)
    settings = ServeSettings(
        host,
        port,
        token_env,
        device,
        dtype.value if dtype else None,
        batch_tokens,
        waiting,
        limits,
        request_seconds,
        drain_seconds,
        revision or (),
    )
    start(models, adapter or (), settings, to_stderr)


@app.command()
def schema(
    recipe: Annotated[str | None, typer.Argument(help="a recipe whose plugins' choices are to stand in it")] = None,
) -> None:
    """Print the JSON schema of recipes, for editors."""
    from opd.config import load_recipe, recipe_schema

    if recipe is not None:
        load_recipe(recipe)

    print(json.dumps(recipe_schema(), indent=1))


@cluster.command("plan")
def plan_cluster(
    recipe: Annotated[str, typer.Argument(help="A .yaml file, or the name of a shipped recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="For example train.micro_tokens=16384")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, max=1_000_000)] = 8,
    gpu: Annotated[str, typer.Option(help="a100, h100, h200 or b200")] = "h100",
    memory: Annotated[float | None, typer.Option(min=0.1, help="GiB of one GPU; default: as it is sold.")] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SIZE", help="student=32B, a teacher's name or a model's; repeat for several."),
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of one prompt; default: rollout.max_prompt_tokens, or 512.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Placement, memory, bytes moved and time of a step on so many GPUs, on paper: no model has to be here."""
    from opd.cluster.plan import cluster_plan, device_named
    from opd.cluster.shapes import given_sizes
    from opd.config import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    plans = cluster_plan(
        loaded, gpus, sizes=given_sizes(size or []), device=device_named(gpu, memory), prompt=prompt_tokens
    )
    if as_json:
        print(json.dumps([plan.to_json() for plan in plans], indent=1))
        return
    for plan in plans:
        print("\n".join(map(plain, plan.lines())))


if __name__ == "__main__":
    main()
