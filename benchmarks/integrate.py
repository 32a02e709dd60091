"""Several specialists, one student: the capability-integration benchmark. docs/evidence/protocol.md has the protocol.

    python benchmarks/integrate.py --edition tiny --directory DIR --workers 2        # minutes on a few cores
    python benchmarks/integrate.py --edition smol --directory DIR --workers 6        # SmolLM2-135M on a GPU

Steps, each of which goes on with what is in DIR:

data          questions of every domain: training, screening, tuning, reporting, all different; the bare model unpacked (smol only)
start         the common start: brief SFT on all domains (smol only)
specialists   one LoRA adapter per domain from the start; `--origin foreign`: from the bare model (smol only)
tune          every arm with each of its learning rates, on tuning prompts
arms          every arm with its best rate, `--seeds` times, on prompts for reporting
enter FILE    answers of another framework to the questions of `data`, marked and put beside the rest
report        pooled scores with intervals: benchmarks/results/integration-EDITION.json and its figure
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from integration import editions
from integration.arms import ARMS, MERGES, merge
from integration.domains import Split
from integration.editions import Edition
from integration.jobs import run_all
from integration.models import build, unpack
from integration.report import draw, enter, pairs, summarise
from integration.scores import Marks, share
from runs import save, saved

STEPS = ("data", "start", "specialists", "tune", "arms", "report")
TUNING_SEED = 100
MEASURED: tuple[Split, ...] = ("tune", "report")


def main() -> None:
    args = arguments().parse_args()
    if args.draw:
        name = result_of(args)
        found = saved(f"{name}.json")
        tell(pairs({arm: entry["runs"] for arm, entry in found["arms"].items()}, found["start"], found["specialists"]))
        return draw(found, name)
    edition = make(args)
    if args.steps_to_do[0] == "enter":
        return print(*(enter(edition, Path(path)) for path in args.steps_to_do[1:]), sep="\n")
    asked = args.steps_to_do if args.steps_to_do != ["all"] else list(STEPS)
    for step in (step for step in STEPS if step in asked):
        {
            "data": lambda: data(edition),
            "start": lambda: start(edition, args),
            "specialists": lambda: specialists(edition, args),
            "tune": lambda: tune(edition, args),
            "arms": lambda: arms(edition, args),
            "report": lambda: report(edition, args),
        }[step]()


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps_to_do", nargs="*", default=["all"], metavar="STEP", help="default: all of them")
    parser.add_argument("--edition", choices=["tiny", "smol"], default="tiny")
    parser.add_argument("--directory", type=Path, default=Path("runs/integration"))
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--domains", nargs="+", help="default: all of the edition's")
    parser.add_argument("--arms", nargs="+", choices=[*ARMS, *MERGES], help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 to 4 (tiny), 0 to 2 (smol)")
    parser.add_argument("--origin", choices=["start", "foreign"], default="start", help="of the specialists")
    parser.add_argument("--steps", type=int, help="of an arm that samples, asks a teacher and trains")
    parser.add_argument(
        "--chosen",
        nargs="+",
        type=setting,
        default=[],
        metavar="ARM=VALUE",
        help="what earlier tuning runs found best, or a recipe's: these arms are not tuned",
    )
    parser.add_argument("--name", help="of a further setting: results are integration-EDITION-NAME")
    parser.add_argument("--tuning-steps", type=int, help="of a tuning run, likewise; default: as many")
    parser.add_argument(
        "--tuning-only",
        action="store_true",
        help="report: the best tuning run of every arm, one seed, on tuning prompts",
    )
    parser.add_argument(
        "--draw",
        action="store_true",
        help="only draw the figure and print differences of arms, from the results that are there",
    )
    parser.add_argument("--rollouts", type=int, help="per step")
    parser.add_argument("--prompts", type=int, help="measured per domain")
    parser.add_argument("--start-steps", type=int, default=96, help="at most")
    parser.add_argument("--start-level", type=float, default=0.3, help="mean score at which the start's training ends")
    parser.add_argument("--start-shares", type=json.loads, default={}, help="of domains in it: '{\"words\": 0.5}'")
    parser.add_argument("--specialist-steps", type=int, default=150)
    parser.add_argument("--limit", type=float, help="seconds of a run; one that takes longer is ended and left out")
    parser.add_argument("--smallest", action="store_true", help="a tiny model in place of SmolLM2, for a test")
    return parser


def setting(text: str) -> tuple[str, float]:
    """`opd-exact=1e-3`"""
    arm, _, value = text.partition("=")
    if arm not in (*ARMS, *MERGES):
        raise argparse.ArgumentTypeError(f"{text!r}: there is no arm {arm!r}")
    return arm, float(value)


def make(args: argparse.Namespace) -> Edition:
    edition = getattr(editions, args.edition)(args.directory)
    edition.domains = args.domains or edition.domains
    edition.steps = args.steps or edition.steps
    edition.rollouts = args.rollouts or edition.rollouts
    edition.prompts, edition.limit = args.prompts or edition.prompts, args.limit
    unpacked = edition.directory / "models" / "base"
    edition.base = str(unpacked.absolute()) if (unpacked / "config.json").is_file() else edition.base
    args.seeds = args.seeds or list(range(5 if args.edition == "tiny" else 3))
    if args.smallest:
        editions.smallest(edition)
    return edition


def data(edition: Edition) -> None:
    edition.write_data()
    if edition.base == "smol":  # quantised, and slow to read: unpacked once for all that grows from it
        edition.base = str(unpack(edition.base, edition.directory / "models" / "base").absolute())


def start(edition: Edition, args: argparse.Namespace) -> None:
    if edition.name == "tiny":
        return
    adapter = (edition.directory / "adapters" / "start").absolute()
    if not adapter.is_dir():
        shares = editions.START_SHARES | args.start_shares
        recipe = editions.joint_start(edition, args.start_steps, 5e-4, args.start_level, shares)
        base = beside(edition.base, adapter)
        job = edition.job("joint", 0, "screen", recipe=recipe, pack=str(adapter), base=base, build=edition.start)
        run_all([job], edition.directory, args.workers)
    build(adapter, Path(edition.start))


def specialists(edition: Edition, args: argparse.Namespace) -> None:
    """The start and every specialist on every domain: the screen. Adapters stay, runs do not."""
    jobs = []
    for domain in edition.domains if edition.name == "smol" else []:
        adapter = Path(edition.specialist(domain, args.origin))
        base = beside(edition.start if args.origin == "start" else edition.base, adapter)
        recipe = editions.specialist(edition, domain, args.origin, args.specialist_steps, 1e-3)
        jobs.append(
            edition.job(f"specialist-{args.origin}", 0, "screen", tags=(domain,), recipe=recipe,
                        pack=str(adapter), base=base, answers=edition.answers(str(adapter))) | {"domains": [domain]}
        )  # fmt: skip
        jobs[-1]["references"] = [of_specialist(edition, domain, args.origin, split) for split in MEASURED]
    start = edition.job("start", 0, "screen", tags=("screen",), model=edition.start)
    start["references"] = [of_start(edition, split) for split in MEASURED]
    drawn = edition.job("start", 0, "screen", tags=("screen", "drawn"), model=edition.start)
    drawn["measure"] |= {"samples": 8, "temperature": 1.0}
    found = run_all([*jobs, start, drawn], edition.directory, args.workers, whole=False)
    for job in jobs:
        if {job["name"], start["name"], drawn["name"]} <= found.keys():
            print(
                screened(job["domains"][0], *(found[one["name"]]["marks"] for one in (start, drawn, job))), flush=True
            )


def screened(domain: str, start: Marks, drawn: Marks, specialist: Marks) -> str:
    """What screening says of a domain: whether the start knows some of it, and the specialist is far above."""
    before, after = share(start[domain]), share(specialist[domain])
    some = sum(digit != "0" for digit in drawn[domain]) / len(drawn[domain])
    stays = before > 0 and some > 0.3 and after - before >= 0.4
    return f"{domain}: start {before:.3f}, pass@8 {some:.3f}, specialist {after:.3f}: {'stays' if stays else 'is left out'}"


def beside(model: str, adapter: Path) -> str:
    """A directory as the adapter names it, so that both can be carried elsewhere."""
    return os.path.relpath(model, adapter) if Path(model).is_absolute() else model


def of_start(edition: Edition, split: Split) -> dict[str, Any]:
    return edition.job("start", 0, split, tags=(split,), model=edition.start)


def of_specialist(edition: Edition, domain: str, origin: str, split: Split) -> dict[str, Any]:
    model = edition.specialist(domain, origin)
    return edition.job(f"reference-{origin}", 0, split, tags=(domain, split), model=model) | {"domains": [domain]}


def references(edition: Edition, args: argparse.Namespace, split: Split) -> tuple[Marks, Marks]:
    """Marks of the start, and of every specialist on its own domain."""
    jobs = [of_start(edition, split)]
    jobs += [of_specialist(edition, domain, args.origin, split) for domain in edition.domains]
    found = [entry["marks"] for entry in run_all(jobs, edition.directory, args.workers).values()]
    specialists = {domain: marks[domain] for domain, marks in zip(edition.domains, found[1:], strict=True)}
    return {domain: found[0][domain] for domain in edition.domains}, specialists


def tune(edition: Edition, args: argparse.Namespace) -> None:
    references(edition, args, "tune")
    names = [name for name in wanted(edition, args) if name not in dict(args.chosen)]
    jobs = [tuning_job(edition, name, setting, args) for name in names for setting in tried(edition, name)]
    run_all(jobs, edition.directory, args.workers, whole=False)


def wanted(edition: Edition, args: argparse.Namespace) -> list[str]:
    """All arms, or those asked for; whole models cannot be stacked as adapters."""
    return [name for name in args.arms or [*ARMS, *MERGES] if edition.name != "tiny" or name != "merge-stack"]


def tried(edition: Edition, arm: str) -> list[float]:
    """The settings of an arm's tuning runs: as many for each, but for a plain average, which has none."""
    return MERGES[arm][1] if arm in MERGES else edition.rates[ARMS[arm].rate]


def arm_job(edition: Edition, name: str, rate: float, seed: int, split: Split, origin: str) -> dict[str, Any]:
    full = name if origin == "start" else f"{name}-{origin}"
    if name in MERGES:
        made = merge(edition, name, rate, origin)
        return edition.job(full, seed, split, tags=(f"{rate:g}",), recipe=made, merged=True, settings={"value": rate})
    arm = ARMS[name]
    recipe = arm.recipe(edition, rate, seed, origin)
    return edition.job(
        full, seed, split, tags=(f"{rate:g}", edition.steps), recipe=recipe, scored=arm.scored,
        drawn_ahead=arm.imitates and edition.draws_ahead, settings={"lr": rate, "steps": edition.steps},
    )  # fmt: skip


def tuning_job(edition: Edition, name: str, setting: float, args: argparse.Namespace) -> dict[str, Any]:
    shorter = replace(edition, steps=args.tuning_steps or edition.steps)
    return arm_job(shorter, name, setting, TUNING_SEED, "tune", args.origin)


def best(edition: Edition, args: argparse.Namespace, name: str) -> float | None:
    """The setting with the highest score on tuning prompts; None: not all of its runs are there."""
    scores = {}
    for setting in tried(edition, name):
        entry = Path(tuning_job(edition, name, setting, args)["entry"])
        if not entry.is_file():
            return None
        marks = json.loads(entry.read_text(encoding="utf-8"))["marks"]
        scores[setting] = mean(share(marks[domain]) for domain in edition.domains)
    return max(scores, key=lambda setting: scores[setting])


def arms(edition: Edition, args: argparse.Namespace) -> None:
    """Arms whose tuning is complete, seed by seed, so that an interrupted study has whole rounds."""
    references(edition, args, "report")
    given = dict(args.chosen)
    settings = {name: given[name] if name in given else best(edition, args, name) for name in wanted(edition, args)}
    jobs = [
        arm_job(edition, name, setting, seed, "report", args.origin)
        for number, seed in enumerate(args.seeds)
        for name, setting in settings.items()
        if setting is not None and not (number and name in MERGES)  # nothing is drawn in a merge
    ]
    run_all(jobs, edition.directory, args.workers, whole=False)


def result_of(args: argparse.Namespace) -> str:
    return "-".join(["integration", args.edition, *filter(None, [args.name, "tuning" if args.tuning_only else ""])])


def report(edition: Edition, args: argparse.Namespace) -> None:
    """Everything that is in the directory, whoever ran it: one JSON file and one figure."""
    split: Split = "tune" if args.tuning_only else "report"
    start, specialists = references(edition, args, split)
    if sum(share(specialists[domain]) - share(start[domain]) for domain in edition.domains) <= 0:
        return print("the specialists are no better than the start: there is nothing to integrate")
    found = summarise(edition, start, specialists, split)
    name = result_of(args)
    save(f"{name}.json", found)
    for arm, entry in sorted(found["arms"].items(), key=lambda item: -item[1]["score"]["value"]):
        score = entry["score"]
        print(
            f"{arm:22} {score['value']:6.3f} [{score['low']:.3f}, {score['high']:.3f}]  {len(entry['runs'])} seeds  "
            f"{entry['flops']['marginal']:.2e} FLOPs"
        )
    tell(found["pairs"])
    draw(found, name)


def tell(differences: dict[str, dict[str, Any]]) -> None:
    for pair, one in differences.items():
        print(f"{pair}: {one['value']:+.3f} [{one['low']:+.3f}, {one['high']:+.3f}]")


if __name__ == "__main__":
    main()
