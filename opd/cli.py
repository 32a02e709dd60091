"""The command line: parse options and call the command. Heavy imports are inside the commands."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opd.common.errors import RESUME_ME, AnotherRank, OpdError, Preempted, Stopped, UserError
from opd.common.text import PlainFormatter, plain, printable

if TYPE_CHECKING:
    from opd.diagnose.diagnosis import Diagnosis
    from opd.recipe import Recipe, Stage


# opd recipes, opd models, opd store


recipes = typer.Typer(no_args_is_help=True, help="Recipes that come with opd.")
models = typer.Typer(no_args_is_help=True, help="Models that come with opd.")
store = typer.Typer(no_args_is_help=True, help="The rollout log of a run.")


@recipes.command("list")
def list_recipes() -> None:
    """The shipped recipes by family, with a line each. The columns of docs/methods.md say more."""
    from opd.recipe import FAMILIES, recipe_facts, shipped_recipes

    facts = {name: recipe_facts(path.read_text(encoding="utf-8")) for name, path in shipped_recipes().items()}
    sections = {"": "To begin with, and whole pipelines", **FAMILIES}
    for family, title in sections.items():
        found = {name: fact for name, fact in facts.items() if fact.get("family", "") == family}
        if found:
            print(f"\n{title}")
        for name, fact in found.items():
            print(plain(f"  {name:32} {fact['title']}", 140))


@recipes.command("show")
def show_recipe(name: str) -> None:
    """Print a shipped recipe."""
    from opd.recipe import find_recipe

    print(printable(find_recipe(name).read_text(encoding="utf-8")), end="")


@recipes.command("copy")
def copy_recipe(name: str, to: Annotated[Path | None, typer.Argument(help="Default: NAME.yaml here.")] = None) -> None:
    """Copy a shipped recipe, to change it."""
    from opd.recipe import find_recipe

    source = find_recipe(name)
    target = to or Path(source.name)
    if target.is_dir():
        target = target / source.name
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise UserError(f"{target} exists already. Give another name: opd recipes copy {name} NEW.yaml") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{str(target)!r} cannot be written: {error}.") from None
    print(plain(f"wrote {target}; run it with: opd run {target}"))


@models.command("list")
def list_models() -> None:
    """Built-in models and how they score."""
    from opd.models.load import catalog

    for line in catalog():
        print(plain(line))


@models.command("export")
def export_model(name: str, to: Path) -> None:
    """Write a model as a plain Hugging Face directory."""
    from opd.models.load import export

    try:
        export(name, to)
    except OSError as error:
        raise UserError(f"{str(to)!r} cannot be written: {error.strerror or error}.") from None
    print(plain(f"wrote {to}"))


@models.command("build")
def build_models(
    to: Annotated[Path | None, typer.Option(help="Where to put them; default: into the package.")] = None,
) -> None:
    """Rebuild tiny/* from fixed seeds (about six minutes on one core)."""
    from opd.models.load import TINY_ROOT
    from opd.runner.tiny_models import build

    build(to or TINY_ROOT, progress=print)


@store.command("check")
def check_store(run: Annotated[Path, typer.Argument(help="A run directory.")]) -> None:
    """Verify every byte of a run's rollout log; exit code 1 if it is damaged."""
    from opd.store.repair import check_log

    report = check_log(run)
    print("\n".join(map(plain, report.lines())))
    if report.damages:
        raise typer.Exit(1)


@store.command("repair")
def repair_store(run: Annotated[Path, typer.Argument(help="A run directory; the run must not be alive.")]) -> None:
    """Save the intact part of a damaged rollout log; the damaged one is kept next to it."""
    from opd.runner.lock import RunLock
    from opd.store.repair import find_log, repair

    with RunLock(find_log(run).parent):
        print("\n".join(map(plain, repair(run))))


# opd report, opd view, opd plot


RunsGiven = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories; several are compared.")]


def add_commands(app: typer.Typer) -> None:
    app.command("report")(_report)
    app.command("view")(_view)
    app.command("plot")(_plot)
    app.command("rollouts")(_rollouts)
    app.command("compare")(_compare)


def _report(
    runs: RunsGiven,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file; default: report.html in the run directory.")
    ] = None,
) -> None:
    """Write a run, or several side by side, as one self-contained HTML file."""
    from opd.report.page import write_report

    print(plain(f"wrote {write_report(runs, out)}"))


def _view(
    run: Annotated[Path, typer.Argument(help="A run directory, of a live or finished run.")],
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0: any free port.")] = 0,
) -> None:
    """Serve the report live to this machine, with every rollout of the store."""
    from opd.report.view import serve_view

    serve_view(run, port, lambda line: print(printable(line), file=sys.stderr, flush=True))


def _plot(
    runs: RunsGiven,
    metric: Annotated[
        list[str], typer.Option(help="As in metrics.jsonl, * for any part of a name; repeat for more panels.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="A .svg, .pdf or .png file.")],
    smooth: Annotated[int, typer.Option(min=1, help="Mean over so many steps.")] = 1,
    width: Annotated[float, typer.Option(min=1.0, max=40.0, help="Inches.")] = 5.5,
) -> None:
    """Draw curves of one run or several, for papers."""
    from opd.report.plot import plot_runs

    print(plain(f"wrote {plot_runs(runs, metric, out, smooth=smooth, width=width)}"))


def _compare(
    runs: RunsGiven,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare runs: scores by domain, the recipe keys that differ, and what changed on shared held-out prompts."""
    from opd.common.files import json_text
    from opd.report.compare import compare_runs, comparison_tables

    found = compare_runs(runs)
    if as_json:
        print(json_text(found, indent=1))
        return
    from rich.console import Console

    console = Console()
    for table in comparison_tables(found):
        console.print(table)


def _rollouts(
    run: Annotated[Path, typer.Argument(help="A run directory, of a live or finished run.")],
    domain: Annotated[str | None, typer.Option()] = None,
    stage: Annotated[str | None, typer.Option(help="Of a pipeline.")] = None,
    right: Annotated[bool, typer.Option("--right", help="Full reward.")] = False,
    wrong: Annotated[bool, typer.Option("--wrong", help="Less than full reward.")] = False,
    steps: Annotated[
        str | None,
        typer.Option(metavar="FROM:TO", help="Whose weights wrote the last token, for example 10:20 or 300:"),
    ] = None,
    min_length: Annotated[int | None, typer.Option(min=0, help="Tokens of the answer.")] = None,
    max_length: Annotated[int | None, typer.Option(min=0)] = None,
    stop: Annotated[str | None, typer.Option(help="How it ended: stop, length or env.")] = None,
    prompt: Annotated[str | None, typer.Option(metavar="ID", help="Answers to one prompt.")] = None,
    teacher: Annotated[str | None, typer.Option(help="Which teacher scored it.")] = None,
    source: Annotated[str | None, typer.Option(help="student, data, teacher:NAME, …")] = None,
    author: Annotated[
        str | None, typer.Option(help="With a token of student, teacher, data, env, …; reads the log.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="In the prompt or the answer; reads the log.")] = None,
    sort: Annotated[
        str,
        typer.Option(
            help="newest, oldest, length, shortest, reward, worst; largest disagreement first: kl, log_ratio, largest_ratio."
        ),
    ] = "newest",
    show: Annotated[int, typer.Option(min=1, max=200, help="So many rows.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find rollouts: filter and sort every answer of a run, and show where student and teacher are furthest apart."""
    from opd.common.files import json_text
    from opd.report.browse import find_rollouts

    if right and wrong:
        raise UserError("--right and --wrong: no rollout is both. Give one of them.")
    given = {
        "domain": domain, "stage": stage, "stop": stop, "prompt": prompt, "teacher": teacher, "source": source, "author": author,
        "text": text, "reward": "right" if right else "wrong" if wrong else None, "length_from": min_length, "length_to": max_length,
        **_versions(steps), "sort": sort, "limit": show,
    }  # fmt: skip
    found = find_rollouts(run, {key: str(value) for key, value in given.items() if value is not None})
    for note in found["notes"]:
        _to_stderr(note)
    print(json_text(found, indent=1)) if as_json else _show_rollouts(found)


def _versions(steps: str | None) -> dict[str, int]:
    """FROM:TO as versions of the weights: step 1 samples with version 0."""
    if steps is None:
        return {}
    match = re.fullmatch(r"(\d{0,9}):(\d{0,9})|(\d{1,9})", steps)
    if match is None or steps == ":":
        raise UserError(f"--steps {steps!r}: expected FROM:TO, for example 10:20, 300: or 12.")
    first, last = (match[3], match[3]) if match[3] else (match[1], match[2])
    return {key: int(value) - 1 for key, value in (("version_from", first), ("version_to", last)) if value}


def _show_rollouts(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    from opd.report.browse import rollout_lines

    console, styles = Console(highlight=False), {"before": "", "token": "bold reverse", "after": ""}
    for number, row in enumerate(found["rows"], start=1):
        facts, strip = rollout_lines(row)
        console.print(Text(f"{number}. {facts}", style="bold"), soft_wrap=True)
        console.print(Text(f"   {plain(row['id'])}", style="dim"), soft_wrap=True)
        console.print(Text.assemble("   ", *((words, styles[part]) for part, words in strip)), soft_wrap=True)
    matching = "more match" if found["more"] else f"{found['total']:,} match"
    _to_stderr(f"{len(found['rows']):,} shown; {matching}, of {found['all']:,} rollouts")


# opd diagnose


LARGEST_SEED = 2**63 - 1  # seed
MAX_NEW_TOKENS = 128  # of an answer, without a recipe


def diagnose_command(
    recipe: Annotated[str | None, typer.Argument(help="A .yaml file, or the name of a shipped recipe.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="With a recipe or without, for example rewards=numeric"),
    ] = None,
    student: Annotated[str | None, typer.Option(help="Without a recipe: the model to train.")] = None,
    teacher: Annotated[
        list[str] | None, typer.Option(metavar="MODEL|NAME=MODEL", help="Its teacher; repeat to compare several.")
    ] = None,
    prompts: Annotated[
        list[str] | None, typer.Option(help="A file, a folder, a task or a dataset; repeat for several.")
    ] = None,
    stage: Annotated[str | None, typer.Option(help="Of a recipe with several; default: the first.")] = None,
    n: Annotated[int, typer.Option(min=2, max=10_000, help="Prompts of each domain.")] = 32,
    samples: Annotated[int, typer.Option(min=2, max=1024, help="Answers of the student to each.")] = 8,
    target: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="The target accuracy, for example 0.9.")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Without a recipe; default 128.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=LARGEST_SEED)] = None,
    write: Annotated[Path | None, typer.Option(help="Write the recommended recipe to this file.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write a self-contained page to this .html file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Before you train: is there a gap, do the models think alike, is the teacher reliable, does on-policy pay?"""
    for place in (write, page):
        _require_free(place)
    changes = list(overrides or ())
    if (
        recipe is not None and "=" in recipe and (student or teacher or prompts)
    ):  # no recipe: the first of the overrides
        changes, recipe = [recipe, *changes], None
    changes += _diagnose_options(changes, device=device, seed=seed)
    if recipe is not None:
        if student or teacher or prompts or max_new_tokens:
            raise UserError(
                "a recipe already names its models, prompts and lengths: give either RECIPE or --student, --teacher and --prompts."
            )
        spec = _stage_of(recipe, changes, stage)
    else:
        lengths = {} if max_new_tokens is None else {"rollout.max_new_tokens": max_new_tokens}
        changes += _diagnose_options(changes, **lengths)
        spec = _stage_around(student, teacher or [], prompts or [], changes)
    from opd.common.files import json_text
    from opd.diagnose.diagnosis import diagnose
    from opd.diagnose.words import diagnosis_lines

    given = recipe is not None or any(change.startswith("objective") for change in changes)
    found = diagnose(spec, prompts=n, samples=samples, target=target, given=given, say=_to_stderr)
    print(json_text(found.to_json(), indent=1) if as_json else "\n".join(diagnosis_lines(found)))
    _write_diagnosis(found, write, page)


def _diagnose_options(changes: Sequence[str], **options: int | str | None) -> list[str]:
    """Options as overrides. A value that is given both ways is an error."""
    found = [f"{key}={value}" for key, value in options.items() if value is not None]
    for option in found:
        key, _, value = option.partition("=")
        if twice := [change for change in changes if change.partition("=")[0] == key]:
            name = key.rpartition(".")[2].replace("_", "-")
            raise UserError(f"--{name} {value} and {twice[0]}: both set {key}. Give one of them.")
    return found


def _to_stderr(line: str) -> None:
    print(plain(line), file=sys.stderr, flush=True)


def _write_diagnosis(found: Diagnosis, recipe: Path | None, page: Path | None) -> None:
    from opd.common.files import write_atomic
    from opd.report.page import diagnosis_page

    if page is not None:
        write_atomic(page, diagnosis_page(found.to_json()))
        _to_stderr(f"wrote {page}")
    if recipe is not None and found.recommendation.settings is None:
        _to_stderr("no recipe was written: there is none to recommend")
    elif recipe is not None:
        write_atomic(recipe, found.recommendation.text())
        _to_stderr(f"wrote {recipe}; look at it with: opd run {recipe} --dry-run")


def _require_free(place: Path | None) -> None:
    """Check the output file before anything is measured."""
    if place is None:
        return
    if place.exists():
        raise UserError(f"{place} exists already. Give another name.")
    if not place.absolute().parent.is_dir():
        raise UserError(
            f"{str(place)!r} cannot be written: there is no directory {str(place.absolute().parent)!r}. Make it first."
        )


def _stage_of(recipe: str, overrides: list[str], name: str | None) -> Stage:
    from opd.recipe import load_recipe

    loaded = load_recipe(recipe, overrides)
    known = {stage.name: stage for stage in loaded.stages}
    if name is not None and name not in known:
        raise UserError(f"--stage {name!r}: the recipe has {', '.join(known)}.")
    return known[name] if name is not None else loaded.stages[0]


def _stage_around(student: str | None, teachers: list[str], prompts: list[str], overrides: list[str]) -> Stage:
    from opd.recipe import load_recipe

    missing = [
        name for name, value in (("--student", student), ("--teacher", teachers), ("--prompts", prompts)) if not value
    ]
    if missing:
        raise UserError(f"{', '.join(missing)}: missing. Give a recipe, or a student, a teacher and prompts.")
    named: dict[str, Any] = {}
    for given in teachers:
        name, model = _named(given)
        if name in named:
            raise UserError(f"--teacher {given!r}: two teachers are called {name!r}. Write NAME={model}.")
        named[name] = {"model": model}
    settings = {
        "student": student,
        "teachers": named,
        "prompts": [{"source": source} for source in prompts],
        "rollout": {"max_new_tokens": MAX_NEW_TOKENS},
    }
    return load_recipe(settings, overrides).stages[0]


def _named(given: str) -> tuple[str, str]:
    """Read NAME=MODEL. Without NAME, one is made from the model's name."""
    name, sign, model = given.partition("=")
    if sign and name and re.fullmatch(r"[\w.-]+", name):
        return name, model
    return re.sub(r"[^\w.-]+", "-", Path(given).name).strip("-") or "teacher", given


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

STOPPED = 130  # the shell's exit code for Ctrl-C
ERROR = 8000  # characters of a message
LARGEST = 2**64 - 1  # seed


def _version(asked: bool) -> None:
    if asked:
        from opd.common.files import this_version

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
    """Print a user's mistake as one message, with exit code 2. A traceback means a bug."""
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


Only = Annotated[str | None, typer.Option("--only", metavar="STAGE", help="Run only this stage.")]
From = Annotated[str | None, typer.Option("--from", metavar="STAGE", help="Start with this stage.")]
Until = Annotated[str | None, typer.Option("--until", metavar="STAGE", help="Stop after this stage.")]


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
        typer.Option(
            help="Run directory; default runs/NAME. An existing one is never overwritten; the next free NAME-2, NAME-3, … is used."
        ),
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
        typer.Option(help="A run whose unchanged finished stages are reused; repeat for several."),
    ] = None,
) -> None:
    """Train: from a recipe to a model."""
    from opd.recipe import load_recipe
    from opd.recipe.graph import ChosenStages
    from opd.recipe.paths import check_output
    from opd.runner.run import launched

    if dry_run or not launched():  # before torch is imported; ranks report a mistake together
        loaded = load_recipe(recipe, overrides or ())
        ChosenStages(only, start, until).require(loaded, elsewhere=resume or bool(reuse))
        check_output(Path("runs") / loaded.name if out is None else out)
    if dry_run:
        _show_plan(loaded)
        return
    if on is not None:
        from opd.cluster.on_ray import run_on_ray

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
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Change the run from here on: train.steps=400 extends it."),
    ] = None,
    mode: Annotated[
        Mode | None,
        typer.Option(help="How unfinished rollouts are continued; default: the recipe's checkpoint.resume."),
    ] = None,
    only: Only = None,
    start: From = None,
    until: Until = None,
) -> None:
    """Continue a run that was killed, stopped, preempted or ran out of disk; with KEY=VALUE also one that is finished."""
    from opd.runner.run import resume as go_on

    go_on(
        run,
        overrides=overrides or (),
        mode=mode.value if mode else None,
        only=only,
        start=start,
        until=until,
        quiet=False,
    )


@app.command()
def sweep(
    recipe: Annotated[str, typer.Argument(help="A .yaml file, or the name of a shipped recipe.")],
    overrides: Annotated[
        list[str],
        typer.Argument(metavar="KEY=VALUE[,VALUE]...", help="For example train.lr=1e-4,3e-4 seed=0,1,2"),
    ],
    out: Annotated[Path | None, typer.Option(help="Directory of the runs; default runs/NAME-sweep.")] = None,
    jobs: Annotated[int, typer.Option(min=1, max=1000, help="Runs at the same time.")] = 1,
) -> None:
    """Run a grid of settings on this machine, and compare the runs. The same command resumes an interrupted sweep."""
    from opd.runner.sweep import sweep as carry_out

    found = carry_out(recipe, overrides, out, jobs, _to_stderr)
    if begun := [run for run in found if (run / "resolved.yaml").is_file()]:
        _compare(begun)
    if failed := {run.name: words for run, words in found.items() if words}:
        for name, words in failed.items():
            _to_stderr(f"FAILED: {name}: {words}")
        raise typer.Exit(1)


@app.command()
def graph(
    recipe: Annotated[str, typer.Argument(help="A .yaml file, or the name of a shipped recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")] = None,
) -> None:
    """Draw the stages of a recipe and what they take from each other, in Mermaid."""
    from opd.recipe import load_recipe
    from opd.recipe.graph import mermaid

    print(printable(mermaid(load_recipe(recipe, overrides or ()))), end="")


def _model(name: str) -> str:
    """A model, or the last checkpoint of a run directory, which is printed."""
    from opd.models.load import require_model
    from opd.runner.directory import model_named

    found = model_named(name)
    if found != name:
        print(plain(f"{name} is a run: its last checkpoint is {found}"), file=sys.stderr)
    require_model(found)
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
            "--plugin", metavar="FILE.py|MODULE", help="A plugin with your rewards or sources; repeat for several."
        ),
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0.01, help="Of the samples of --k; default 1.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    seed: Annotated[int, typer.Option(min=0, max=LARGEST)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure pass@1 and pass@k of a model on a file, a dataset or a task."""
    from opd.common.files import json_text
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
        typer.Option(metavar="MODEL", help="A teacher that scores each answer, and also answers."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 1.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    seed: Annotated[int, typer.Option(min=0, max=LARGEST)] = 0,
    environment: Annotated[
        str | None,
        typer.Option(
            metavar="KIND|{kind: …}", help="What answers the model between its turns, as in a recipe: calculator."
        ),
    ] = None,
    plugins: Annotated[
        list[str] | None,
        typer.Option("--plugin", metavar="FILE.py|MODULE", help="A plugin with your environment; repeat for several."),
    ] = None,
) -> None:
    """Chat with a model, and compare a teacher; one question per line, until the end of the input."""
    model, against = _model(model), None if against is None else _model(against)
    from rich.console import Console

    from opd.runner.chat import Conversation, chosen_environment, converse, questions
    from opd.runner.checks import pick_device

    played = chosen_environment(environment, plugins or ())
    place, said = str(pick_device(device)), {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    talk = Conversation(model, against, console=Console(highlight=False), device=place, environment=played, **said)  # type: ignore[arg-type]
    converse(talk, questions(lambda: input("you> " if sys.stdin.isatty() else "")))


def _require_only(context: typer.Context, flag: str, taken: Sequence[str]) -> None:
    """Raise an error if an option was given that has no meaning with a flag."""
    for name in sorted(context.params.keys() - {flag, *taken}):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UserError(
                f"--{name.replace('_', '-')} does not belong to --{flag}: its run is set by RECIPE [KEY=VALUE]..., "
                "for example device=cpu. Remove it."
            )


class Precision(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


@app.command()
def serve(
    context: typer.Context,
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL|NAME=MODEL...", help="Models that score for runs elsewhere.")
    ],
    adapter: Annotated[
        list[str] | None, typer.Option(metavar="NAME=DIR", help="An adapter directory; repeat for several.")
    ] = None,
    revision: Annotated[
        list[str] | None, typer.Option(metavar="NAME=REVISION", help="Of a model on the hub; default: its newest.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address; anything but loopback is open to others.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0: any free port.")] = 8200,
    token_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The variable that holds the token; default: a random one, which is printed."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    dtype: Annotated[Precision | None, typer.Option(help="Default: float32 on a CPU, bfloat16 on a GPU.")] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one forward pass.")] = 8192,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens in one request.")] = 131_072,
    max_sequences: Annotated[int, typer.Option(min=1, help="Texts in one request.")] = 4096,
    max_bytes: Annotated[int, typer.Option(min=1, help="Bytes of one request.")] = 16 << 20,
    waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait; further ones get 429.")] = 4096,
    request_seconds: Annotated[float, typer.Option(min=0.1, help="Seconds for a request to arrive.")] = 30.0,
    drain_seconds: Annotated[float, typer.Option(min=0.0, help="For the last answers after SIGTERM.")] = 60.0,
    tinker: Annotated[
        bool, typer.Option("--tinker", help="Serve the Tinker API: training clients over these.")
    ] = False,
    checkpoints: Annotated[Path, typer.Option(help="Of --tinker: saved states.")] = Path("tinker-checkpoints"),
    student: Annotated[bool, typer.Option("--student", help="Train RECIPE [KEY=VALUE]...: agents ask here.")] = False,
) -> None:
    """Serve models as teachers: hidden states, log-probs and likeliest ids over HTTP."""
    from opd.common.http import to_stderr

    if student:
        from opd.serve.student import serve_student

        _require_only(context, "student", ("models", "host", "port", "token_env"))
        return serve_student(models, host, port, token_env, to_stderr)
    from opd.serve import server
    from opd.teachers.served import RequestLimits

    settings = server.ServeSettings(
        host,
        port,
        token_env,
        device,
        dtype.value if dtype else None,
        batch_tokens,
        waiting,
        RequestLimits(max_bytes, max_tokens, max_sequences),
        request_seconds,
        drain_seconds,
        revision or (),
        checkpoints if tinker else None,
    )
    server.serve(models, adapter or (), settings, to_stderr)


@app.command()
def schema(
    recipe: Annotated[str | None, typer.Argument(help="a recipe whose plugins' choices are to be included")] = None,
) -> None:
    """Print the JSON schema of recipes, for editors."""
    from opd.recipe import load_recipe, recipe_schema

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
    memory: Annotated[float | None, typer.Option(min=0.1, help="GiB per GPU; default: that of the product.")] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SIZE", help="student=32B, a teacher's name or a model's; repeat for several."),
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of one prompt; default: rollout.max_prompt_tokens, or 512.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Placement, memory, bytes moved and time of a step on so many GPUs, estimated: no model has to be on this machine."""
    from opd.cluster.plan import cluster_plan, device_named, given_sizes
    from opd.recipe import load_recipe

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
