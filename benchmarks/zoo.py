"""The methods side by side: one task, one start, the same number of sampled answers, and what each costs.

    python benchmarks/zoo.py --methods opd,gkd,sft,grpo --seeds 1        # some of them
    python benchmarks/zoo.py --directory DIR --seeds 3 --workers 2       # all; started again, it continues where it stopped

Each recipe under opd/recipes/methods runs as it is, except for the task (addition), the number of answers per step and the number of
steps, which are the same for all; moments and rates of schedules are scaled with the steps. Learning rates are the recipes' own, unless
`--factors` asks for several multiples: then each method uses the one that does best with a seed of its own.

Scores are compared after equal numbers of response tokens and after equal numbers of floating-point operations, at the smallest
budget that all methods reach. Operations are counted as 2 per weight and token read or drawn, and 6 per weight and token trained.
Next to the score: pass@8, answer length, and forgetting, which is how much the score falls on tasks that are not trained. Methods that
need another tokenizer, a server, an environment, several domains or earlier rollouts are left out, and the result says why.

Writes benchmarks/results/zoo.json and docs/figures/zoo.svg.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import tempfile
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml
from runs import carry_out, save, save_figure, saved
from safetensors import safe_open

import opd.models
from opd.recipe import Stage, load_recipe, shipped_recipes
from opd.runner.evaluate import evaluate_model
from opd.runner.run import Run
from opd.store import RolloutStore

STUDENT, TASK, DOMAIN = "tiny/generalist", "task:addition", "arithmetic"
OTHERS = ["task:reverse", "task:caesar"]  # what a method may forget
MOMENTS = ("until", "after", "over", "warmup")  # keys that count steps
TUNING_SEED = 100
SAMPLES = 8  # of pass@k
CURRICULUM = 256  # different prompts of methods with a curriculum, which chooses when they come again
GIVEN = ("data", "rejected")  # authors whose answers nobody draws


def methods() -> tuple[list[str], dict[str, str]]:
    """Names of the methods that can be compared, and those that cannot with the reason."""
    every = [name.removeprefix("methods/") for name in shipped_recipes() if name.startswith("methods/")]
    reasons = {name: why_not(load_recipe(f"methods/{name}").stages) for name in every}
    return [name for name in every if not reasons[name]], {name: why for name, why in reasons.items() if why}


def why_not(stages: list[Stage]) -> str:
    """Why a method is left out; empty: it is not."""
    teachers = [kind for stage in stages for kind in stage.teachers.values()]
    sources = [prompt for stage in stages for prompt in stage.prompts if not prompt.gives_plain_text]
    settings = json.dumps([stage.model_dump(mode="json", exclude_none=True) for stage in stages])
    reasons = {
        "its teacher has another tokenizer": any(kind.view.crosses for kind in teachers),
        "its prompts bring a document": any(kind.view.name == "context" for kind in teachers),
        "it trains on rollouts of an earlier stage": any(prompt.source.startswith("stage:") for prompt in sources),
        "it trains several domains": len({prompt.domain for prompt in sources}) > 1,
        "it needs an environment": any(stage.rollout.environment is not None for stage in stages),
        "it starts from another model": stages[0].student.model != STUDENT,
        "it asks a server": '"address"' in settings,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def adapted(name: str, seed: int, factor: float, args: argparse.Namespace) -> dict[str, Any]:
    """A method's recipe on the common task, with the common number of answers and steps."""
    raw = yaml.safe_load(shipped_recipes()[f"methods/{name}"].read_text(encoding="utf-8"))
    stages = load_recipe(f"methods/{name}").stages
    share = args.steps / sum(stage.train.steps for stage in stages)
    written = raw.get("stages", [{}])
    for stage, part in zip(stages, written, strict=True):
        scaled(part, share)
        samples = stage.rollout.samples
        part["rollout"] = {**part.get("rollout", {}), "prompts": max(1, args.rollouts // samples)}
        rate = {"steps": max(1, round(stage.train.steps * share)), "lr": stage.train.lr * factor}
        part["train"] = {**part.get("train", {}), **rate}
        part.pop("eval", None)
    scaled({key: value for key, value in raw.items() if key != "stages"}, share)
    every = max(1, args.steps // args.evaluations)
    evaluation = {"prompts": args.prompts, "every": every, "teachers": False}
    if stages[0].eval.loss:
        evaluation["loss"] = True
    texts = [prompt for prompt in raw.get("prompts", []) if isinstance(prompt, dict) and prompt.get("plain_text")]
    limit = {"limit": CURRICULUM} if stages[0].curriculum is not None else {}
    common = {
        "prompts": [{"source": TASK, "domain": DOMAIN, "share": 3, **limit}, *texts], "eval": evaluation, "seed": seed,
        "device": "cpu", "threads": 1, "log": {"start_table": False}, "monitors": "off",
    }  # fmt: skip
    if "stages" in raw:
        return {**raw, **common}
    part = written[0]
    merged = {key: {**raw.get(key, {}), **part[key]} for key in ("rollout", "train")}
    return {**raw, **common, **merged}


def scaled(part: Any, share: float) -> None:
    """Scale the moments of schedules, wherever they stand."""
    for key, value in part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ():
        if key in MOMENTS and isinstance(value, int):
            part[key] = max(0 if key == "warmup" else 1, round(value * share))
        elif isinstance(value, (dict, list)):
            scaled(value, share)


# --- What a run cost, and what it reached ---


def measured(model: str, directory: Path, prompts: int) -> dict[str, float]:
    """Score, pass@8 and answer length of a model on the task, and its score on the tasks that are not trained. Kept in `directory`."""
    kept = directory / "measured.json"
    if not kept.is_file():
        settings: dict[str, Any] = {"count": prompts, "max_new_tokens": 16, "device": "cpu", "seed": 0}
        (task,) = evaluate_model(model, [TASK], k=SAMPLES, **settings).to_json().values()
        others = evaluate_model(model, OTHERS, k=0, **settings).to_json().values()
        values = {key: task[key] for key in ("greedy", "pass_at_k", "length")} | {
            "others": mean(other["greedy"] for other in others)
        }
        kept.write_text(json.dumps(values) + "\n", encoding="utf-8")
    return dict(json.loads(kept.read_text(encoding="utf-8")))


def read(directory: Path) -> dict[str, Any]:
    """[tokens, operations, score] at every evaluation."""
    stages = load_recipe(str(directory / "resolved.yaml")).stages
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    with safe_open(Path(opd.models.__file__).parent / STUDENT / "model.safetensors", "np") as file:
        weights = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    with closing(RolloutStore(directory / "rollouts", read_only=True)) as store:
        prompt = mean(entry.prompt_length for entry in store.entries.values())
    first, last = (summary["stages"][number]["evals"] for number in (0, -1))
    curve, tokens, operations = [[0, 0.0, first[DOMAIN]["before"]]], 0, 0.0
    for stage in stages:
        for line in (line for line in lines if line["stage"] == stage.name):
            tokens += line["tokens"]
            read_tokens = line["tokens"] * (1 + prompt / max(line["response_length"], 1))
            operations += weights * read_tokens * per_token(stage)
            if f"eval/{DOMAIN}" in line:
                curve.append([tokens, operations, line[f"eval/{DOMAIN}"]])
    curve.append([tokens, operations, last[DOMAIN]["after"]])
    return {
        "curve": curve,
        "score": last[DOMAIN]["after"],
        "seconds": round(sum(stage["seconds"] for stage in summary["stages"]), 1),
    }


def per_token(stage: Stage) -> float:
    """Operations per weight and token of a step: drawing, scoring, training. All models of the zoo are equally large."""
    by_share = sum(writer.share for writer in stage.rollout.everyone if writer.author not in GIVEN)
    writers = stage.rollout.by_sample
    drawn = mean(by_share if writer is None else float(writer.author not in GIVEN) for writer in writers)
    scored = sum(max(len(kind.scored_with()), 1) for kind in stage.teachers.values())
    trained = stage.train.epochs if stage.objective else 0
    own = sum(8 if kind.learns else 2 for kind in stage.modules.values() if kind.own)
    return 2 * drawn + 2 * scored + 6 * trained + own


def at(curve: list[list[float]], axis: int, budget: float) -> float:
    """The score after a budget, on the straight line between two evaluations."""
    for before, after in pairwise(curve):
        if after[axis] >= budget and after[axis] > before[axis]:
            share = (budget - before[axis]) / (after[axis] - before[axis])
            return before[2] + share * (after[2] - before[2])
    return curve[-1][2]


def run_name(name: str, seed: int, factors: dict[str, float]) -> str:
    """Of a method's run, with the multiple of its learning rate: runs of another one stay where they are."""
    return f"{name}-seed{seed}" + (f"-x{factors[name]:g}" if factors[name] != 1 else "")


def compare(runs: dict[str, dict[str, Any]], names: dict[str, list[str]]) -> dict[str, Any]:
    """The row of each method: means over seeds, and standard errors of the scores at equal budgets."""
    budgets = [min(run["curve"][-1][axis] for run in runs.values()) for axis in (0, 1)]
    rows = {}
    for name, keys in names.items():
        found = [runs[key] for key in keys]
        row: dict[str, Any] = {}
        for axis, key in enumerate(("equal_tokens", "equal_operations")):
            scores = [at(run["curve"], axis, budgets[axis]) for run in found]
            row[key] = mean(scores)
            row[f"{key}_stderr"] = stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else None
        row |= {
            key: mean(run[key] for run in found)
            for key in ("score", f"pass@{SAMPLES}", "length", "forgetting", "seconds")
        }
        row["tokens"], row["operations"] = (mean(run["curve"][-1][axis] for run in found) for axis in (0, 1))
        rows[name] = row
    return {"tokens": budgets[0], "operations": budgets[1], "methods": rows}


def trained(key: str, name: str, seed: int, factor: float, directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One run of a method, and what its model can do afterwards. What is in `directory` already is read."""
    where = carry_out(key, adapted(name, seed, factor, args), directory, here=True)
    found, before = read(where), measured(STUDENT, directory, args.prompts)
    after = measured(str(Run(where).model), where, args.prompts)
    lost = before["others"] - after["others"]
    return found | {f"pass@{SAMPLES}": after["pass_at_k"], "length": after["length"], "forgetting": lost}


class Here(Executor):
    """Runs in this process, one after another."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", help="names, separated by commas; default: all that can be compared")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="of every method, all its stages together")
    parser.add_argument("--rollouts", type=int, default=64, help="answers per step")
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0], help="multiples of a recipe's learning rate")
    parser.add_argument("--prompts", type=int, default=200, help="held-out prompts of an evaluation")
    parser.add_argument("--evaluations", type=int, default=6, help="on the way")
    parser.add_argument("--workers", type=int, default=0, help="processes, one thread each; 0: in this process")
    parser.add_argument("--directory", type=Path, help="keep the runs here, and continue with those that are there")
    parser.add_argument("--draw", action="store_true", help="only draw the figure, from the results that are there")
    args = parser.parse_args()
    if args.draw:
        return draw(saved("zoo.json"))
    known, left_out = methods()
    names = args.methods.split(",") if args.methods else known
    for name in names:
        if name not in known:
            raise SystemExit(f"--methods {name}: {left_out.get(name) or 'no such method; known: ' + ', '.join(known)}")
    directory = args.directory or Path(tempfile.mkdtemp())
    directory.mkdir(parents=True, exist_ok=True)
    measured(STUDENT, directory, args.prompts)
    spawn = multiprocessing.get_context("spawn")  # torch does not like to be forked
    with ProcessPoolExecutor(args.workers, spawn) if args.workers else Here() as pool:
        factors = tuned(pool, names, directory, args)
        # all methods with the first seed come first, so that an interrupted study has a result for each
        keys = {run_name(name, seed, factors): (name, seed) for seed in range(args.seeds) for name in names}
        waiting = {
            key: pool.submit(trained, key, name, seed, factors[name], directory, args)
            for key, (name, seed) in keys.items()
        }
        runs = {}
        for number, (key, future) in enumerate(waiting.items(), 1):
            runs[key] = future.result()
            print(f"{number}/{len(waiting)} {key}: {runs[key]['score']:.1%}", flush=True)
    result = compare(runs, {name: [run_name(name, seed, factors) for seed in range(args.seeds)] for name in names})
    for name, row in sorted(result["methods"].items(), key=lambda item: -item[1]["equal_tokens"]):
        print(f"{name:24} {row['equal_tokens']:7.1%} {row['equal_operations']:7.1%} pass@{SAMPLES} {row[f'pass@{SAMPLES}']:6.1%} "
              f"length {row['length']:4.1f} forgetting {row['forgetting']:+6.1%} {row['operations']:8.2e} operations")  # fmt: skip
    settings = {key: getattr(args, key) for key in ("steps", "rollouts", "seeds", "prompts")}
    start = measured(STUDENT, directory, args.prompts)
    save("zoo.json", {"task": TASK, "start": STUDENT, **settings, "before": start, "factors": factors, **result, "left_out": left_out, "runs": runs})  # fmt: skip
    return draw(saved("zoo.json"))


def tuned(pool: Executor, names: list[str], directory: Path, args: argparse.Namespace) -> dict[str, float]:
    """For each method the multiple of its learning rate that ends highest with a seed of its own."""
    if len(args.factors) == 1:
        return dict.fromkeys(names, float(args.factors[0]))
    tries = {
        (name, factor): pool.submit(trained, f"tuning-{name}-{factor:g}", name, TUNING_SEED, factor, directory, args)
        for factor in args.factors
        for name in names
    }
    scores = {key: future.result()["score"] for key, future in tries.items()}
    return {name: float(max(args.factors, key=lambda factor: scores[name, factor])) for name in names}


def draw(results: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = sorted(results["methods"].items(), key=lambda item: item[1]["equal_tokens"])
    figure, axis = plt.subplots(figsize=(8, 1.2 + 0.24 * len(rows)))
    for key, label, offset in (("equal_tokens", "equal tokens", 0.15), ("equal_operations", "equal operations", -0.15)):
        places = [number + offset for number in range(len(rows))]
        errors = [row[f"{key}_stderr"] or 0.0 for _, row in rows]
        axis.errorbar([row[key] for _, row in rows], places, xerr=errors, fmt="o", markersize=4, label=label)
    axis.axvline(results["before"]["greedy"], linestyle="--", color="0.5", label="start")
    axis.set(
        ylim=(-1, len(rows)), yticks=range(len(rows)), yticklabels=[name for name, _ in rows], xlabel="held-out score (greedy)",
        title=f"{results['task']}, {results['seeds']} seeds, {results['tokens']:,.0f} response tokens",
    )  # fmt: skip
    save_figure(figure, axis, "zoo.svg")


if __name__ == "__main__":
    main()
