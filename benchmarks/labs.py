"""Every lab's pipeline whole, each a process with one thread: how long it takes, its story, and what became of its prediction.

    python benchmarks/labs.py --workers 8                     # once each
    python benchmarks/labs.py --workers 8 --seeds 0 1 2       # as docs/evidence/labs.md reports them

`labs/mimo-v2-flash` has two further arms, which take its specialists over and change its last stage: without the reward, and with
the reward alone. Runs that are there already are read, not repeated; those that the results have of the same recipes, on whatever machine
they were made, stay in them. Writes benchmarks/results/labs-cpu.json; a lab that is changed on purpose (`--set`) goes into a file of its own:

    python benchmarks/labs.py --labs labs/mimo-v2-flash --set stages.mopd.train.steps=60 stages.mopd.eval.every=10 --name mimo-pilot
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import yaml
from runs import RESULTS, refuse_other_changes, save, saved

from opd.recipe import shipped_recipes
from opd.runner.reports import story_lines

LABS = [name for name in shipped_recipes() if name.startswith("labs/")]
DRAWS = 2000
MIMO = "labs/mimo-v2-flash"
ARMS = {  # of MiMo's last stage
    "opd": ["stages.mopd.objective.advantage={student: current}"],
    "reward": ["stages.mopd.teachers={}", "stages.mopd.objective.advantage={teacher_weight: 0, outcome_weight: 1, baseline: group, std: true}"],
}  # fmt: skip


def folder(directory: Path, lab: str, seed: int, arm: str = "") -> Path:
    parts = [lab.removeprefix("labs/"), *([f"seed{seed}"] if seed else []), *([arm] if arm else [])]
    return directory / "-".join(parts)


def carry_out(lab: str, seed: int, directory: Path, changes: list[str]) -> None:
    """The lab, and MiMo's further arms behind it. One that fails is told about; the others go on."""
    out = folder(directory, lab, seed)
    seeded = [*changes, *([f"seed={seed}"] if seed else [])]
    if _run(lab, seeded, out) and lab == MIMO:
        for arm, further in ARMS.items():
            _run(lab, [*seeded, *further], folder(directory, lab, seed, arm), "--reuse", str(out))


def _run(lab: str, changes: list[str], out: Path, *options: str) -> bool:
    if summary_of(out) is None:
        command = [sys.executable, "-m", "opd", "run", lab, *changes, "--out", str(out), "--resume", *options]
        threads = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, env=threads, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{out.name}: {done.stdout[-1000:]}{done.stderr[-2000:]}", flush=True)
    return summary_of(out) is not None


def summary_of(out: Path) -> dict[str, Any] | None:
    """Of a run that has ended."""
    path = out / "summary.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found if found.get("status") == "done" else None


def scores_of(summary: dict[str, Any]) -> dict[str, Any]:
    """Stage -> domain -> before, after, teacher: what outcomes are computed from."""
    kept = ("n", "greedy", "sampled", "pass_at_k")
    return {
        stage["name"]: {
            domain: {when: {key: one[key] for key in kept if key in one} for when, one in found["details"].items()}
            for domain, found in stage["evals"].items()
        }
        for stage in summary["stages"]
    }


# What was predicted


@dataclass
class Scores:
    """What a run measured; with `draws`, each number drawn anew within its own error."""

    stages: dict[str, dict[str, Any]]  # stage -> domain -> before, after, teacher
    draws: np.random.Generator | None = None

    def of(self, stage: str, when: str, key: str = "greedy") -> dict[str, float]:
        """By domain; `when`: before, after, or teacher."""
        found = self.stages[stage]
        return {domain: self._drawn(one[when][key], one[when]["n"]) for domain, one in found.items() if when in one}

    def _drawn(self, share: float, n: int) -> float:
        if self.draws is None:
            return share
        shrunk = (share * n + 1) / (n + 2)  # a full score has an error, too
        return share + float(self.draws.normal(0.0, (shrunk * (1 - shrunk) / n) ** 0.5))


Arms = dict[str, Scores]  # "" is the lab itself
Outcome = Callable[[Arms], float]


def average(arms: Arms, stage: str, when: str = "after", arm: str = "", key: str = "greedy") -> float:
    return mean(arms[arm].of(stage, when, key).values())


def recovered(arms: Arms) -> float:
    """GLM-5: of each earlier domain what is left of its peak behind the last stage; the worst of them."""
    own = {"arithmetic": "reasoning-rl", "spelling": "agentic-rl", "ciphers": "sft"}
    after = arms[""].of("recovery", "after")
    return min(after[domain] / arms[""].of(stage, "after")[domain] for domain, stage in own.items())


def kept(arms: Arms) -> float:
    return arms[""].of("recovery", "after")["sorting"] / arms[""].of("general-rl", "after")["sorting"]


def above_teachers(arms: Arms) -> float:
    """Share of the domains in which the student is above its teacher; where that is the student itself, above its start."""
    before, after, teacher = (arms[""].of("mopd", when) for when in ("before", "after", "teacher"))
    return mean(after[domain] > teacher.get(domain, before[domain]) for domain in after)


def lowest(arms: Arms) -> float:
    """Nemotron: the weakest domain as the next RL stage finds it, with re-anchoring less without."""
    scores = arms[""]
    return min(scores.of("further-rl", "before").values()) - min(scores.of("multi-domain-rl", "after").values())


def integrated(arms: Arms, stage: str = "merged") -> float:
    before, after, teacher = (arms[""].of(stage, when) for when in ("before", "after", "teacher"))
    return sum(after[name] - before[name] for name in teacher) / sum(teacher[name] - before[name] for name in teacher)


PREDICTIONS: dict[str, dict[str, tuple[Outcome, float]]] = {  # what is measured, and what it was predicted to be at least
    "labs/qwen3": {
        "on-policy less off-policy, at equal answers, greedy": (lambda a: average(a, "on-policy") - average(a, "off-policy-longer"), 0.0),
        "the same, sampled": (lambda a: average(a, "on-policy", key="sampled") - average(a, "off-policy-longer", key="sampled"), 0.0),
        "pass@8 after on-policy less before": (lambda a: average(a, "on-policy", key="pass_at_k") - average(a, "on-policy", "before", key="pass_at_k"), 0.0),
    },
    "labs/glm5": {"worst earlier domain, of its peak": (recovered, 0.97), "last domain, of its peak": (kept, 0.97)},
    MIMO: {
        "OPD + reward less OPD": (lambda a: average(a, "mopd") - average(a, "mopd", arm="opd"), 0.0),
        "OPD less reward alone": (lambda a: average(a, "mopd", arm="opd") - average(a, "mopd", arm="reward"), 0.0),
        "domains above their teacher": (above_teachers, 0.5),
    },
    "labs/nemotron-cascade2": {"lowest domain, re-anchored less not": (lowest, 0.0)},
    "labs/deepseek-v4": {"normalised score of twelve teachers": (integrated, 0.95)},
    "labs/two-rounds": {"second round less first": (lambda a: average(a, "merged-2") - average(a, "merged-1"), 0.0)},
}  # fmt: skip


def outcome(predicted: Outcome, runs: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Mean over seeds; the 95 % interval draws seeds, and every score within the error of its prompts."""
    generator = np.random.default_rng(0)

    def one(run: dict[str, dict[str, Any]], draws: np.random.Generator | None) -> float:
        return predicted({arm: Scores(stages, draws) for arm, stages in run.items()})

    drawn = [
        mean(one(runs[number], generator) for number in generator.integers(len(runs), size=len(runs)))
        for _ in range(DRAWS)
    ]
    low, high = np.quantile(drawn, (0.025, 0.975))
    by_seed = [one(run, None) for run in runs]
    return {"value": mean(by_seed), "low": float(low), "high": float(high), "by_seed": by_seed}


def outcomes(lab: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    whole = [{"": run["scores"], **run.get("arms", {})} for run in runs]
    whole = [run for run in whole if lab != MIMO or set(run) == {"", *ARMS}]
    return {
        name: outcome(predicted, whole) | {"predicted": least, "seeds": len(whole)}
        for name, (predicted, least) in (PREDICTIONS.get(lab, {}) if whole else {}).items()
    }


def record(lab: str, seed: int, directory: Path) -> dict[str, Any] | None:
    """What is kept of a run: every score, so that outcomes can be computed again."""
    summary = summary_of(folder(directory, lab, seed))
    if summary is None:
        return None
    further = {arm: summary_of(folder(directory, lab, seed, arm)) for arm in (ARMS if lab == MIMO else {})}
    return {
        "seed": seed,
        "recipe": recipe_hash(lab),
        "seconds": round(sum(stage["seconds"] for stage in summary["stages"]), 1),
        "tokens": {stage["name"]: stage["tokens"] for stage in summary["stages"]},
        "story": summary["story"],
        "scores": scores_of(summary),
        "arms": {arm: scores_of(found) for arm, found in further.items() if found},
        "curves": {arm: curve_of(folder(directory, lab, seed, arm)) for arm in ("", *further)},
    }


def curve_of(out: Path) -> list[dict[str, Any]]:
    """Evaluations on the way of the last stage (`eval.every`): its tokens so far, and the score by domain."""
    path, found, tokens = out / "metrics.jsonl", [], 0
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    for line in (line for line in lines if line["stage"] == lines[-1]["stage"]):
        tokens += line["tokens"]
        scores = {key.removeprefix("eval/"): value for key, value in line.items() if key.startswith("eval/")}
        found += [{"step": line["step"], "tokens": tokens, "scores": scores}] if scores else []
    return found


def recipe_hash(lab: str) -> str:
    """Of what the recipe says; remarks make no difference."""
    read = yaml.safe_load(shipped_recipes()[lab].read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()[:16]


def earlier(result: str, changes: list[str]) -> dict[str, dict[int, dict[str, Any]]]:
    """Lab -> seed -> what the results have of the recipe as it is now, with the same changes."""
    if not (RESULTS / result).is_file():
        return {}
    found = saved(result)
    return {
        lab: {run["seed"]: run for run in entry["runs"] if run.get("recipe") == recipe_hash(lab)}
        for lab, entry in found["labs"].items()
        if lab in LABS and found["changes"] == changes
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="of the runs; default: runs/labs, with --set runs/labs-NAME")
    parser.add_argument("--workers", type=int, default=2, help="0: only read what is there")
    parser.add_argument("--labs", nargs="+", default=LABS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="for all of them")
    parser.add_argument("--name", default="cpu", help="of the results: benchmarks/results/labs-NAME.json")
    arguments = parser.parse_args()
    result = f"labs-{arguments.name}.json"
    refuse_other_changes(result, arguments.set)
    directory = arguments.directory or Path(f"runs/labs-{arguments.name}" if arguments.set else "runs/labs")
    with ThreadPoolExecutor(arguments.workers or 1) as pool:
        for seed in arguments.seeds if arguments.workers else ():
            for lab in arguments.labs:
                pool.submit(carry_out, lab, seed, directory, arguments.set)
    known = earlier(result, arguments.set)
    results: dict[str, Any] = {}
    for lab in LABS:
        fresh = {seed: record(lab, seed, directory) for seed in arguments.seeds}
        runs = known.get(lab, {}) | {seed: run for seed, run in fresh.items() if run}
        if not runs:
            continue
        results[lab] = {"runs": [runs[seed] for seed in sorted(runs)]}
        results[lab]["outcomes"] = outcomes(lab, results[lab]["runs"])
        first = results[lab]["runs"][0]
        print(f"{lab}: {len(runs)} seeds, {first['seconds']} s", *story_lines(first["story"]), sep="\n  ")
        for name, found in results[lab]["outcomes"].items():
            print(f"  -> {name}: {found['value']:.3f} [{found['low']:.3f}, {found['high']:.3f}], predicted at least {found['predicted']:g}")  # fmt: skip
    save(result, {"changes": arguments.set, "labs": results})


if __name__ == "__main__":
    main()
