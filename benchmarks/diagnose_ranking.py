"""Does the ranking of `opd diagnose` agree with what training shows? Every tiny specialist as a teacher of every domain: 16 pairs.

Each pair is diagnosed (the signal: take-over advantage × AUROC), and then trained on for a few steps; the gain is held-out pass@1 after
training less before. Reported: Spearman's rank correlation over all pairs, and whether the best-ranked teacher of each domain gained most.

    python benchmarks/diagnose_ranking.py --steps 20 --out benchmarks/results/diagnose-ranking.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from runs import circumstances

import opd
from opd.diagnose.diagnosis import Diagnosis, diagnose
from opd.recipe import load_recipe

TASKS = {"arithmetic": "addition", "spelling": "reverse", "sorting": "sort", "ciphers": "caesar"}
TEACHERS = tuple(TASKS)


def settings(domains: list[str], teachers: list[str]) -> dict[str, Any]:
    return {
        "student": "tiny/generalist",
        "teachers": {name: f"tiny/{name}" for name in teachers},
        "prompts": [{"source": f"task:{TASKS[domain]}", "domain": domain} for domain in domains],
        "rollout": {"max_new_tokens": 16},
        "device": "cpu",
        "threads": 1,
    }


def gain(domain: str, teacher: str, steps: int, prompts: int) -> float:
    """Held-out pass@1 after training on one pair, less before."""
    recipe = settings([domain], []) | {
        "teachers": {domain: f"tiny/{teacher}"},
        "train": {"steps": steps, "lr": 5e-4, "warmup": 3},
        "eval": {"prompts": prompts, "teachers": False},
        "log": {"start_table": False, "samples": 0},
        "checkpoint": {"background": False},
    }
    with tempfile.TemporaryDirectory() as folder:
        run = opd.run(recipe, out=Path(folder) / "run")
        found = run.summary["stages"][0]["evals"][domain]
        return float(found["after"] - found["before"])


def ranks(values: list[float]) -> np.ndarray:
    """Equal values share the mean of their ranks."""
    array = np.array(values)
    return np.array([(array < value).sum() + ((array == value).sum() - 1) / 2 for value in array])


def correlation(first: list[float], second: list[float]) -> float:
    """Spearman's."""
    return float(np.corrcoef(ranks(first), ranks(second))[0, 1])


def pairs_of(found: Diagnosis, steps: int, prompts: int) -> list[dict[str, Any]]:
    rows = []
    for pair in found.pairs:
        row = {
            "domain": pair.domain,
            "teacher": pair.teacher,
            "verdict": found.decisions[pair.domain, pair.teacher].rule.verdict,
            "signal": pair.signal,
            "gap": pair.gap,
            "auroc": pair.auroc,
            "kl": pair.kl,
            "gained": gain(pair.domain, pair.teacher, steps, prompts),
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=200, help="held-out ones of each evaluation")
    parser.add_argument("--domains", type=int, default=4)
    parser.add_argument("--asked", type=int, default=32, help="prompts of each domain that are diagnosed on")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    domains = list(TASKS)[: given.domains]
    found = diagnose(load_recipe(settings(domains, list(TEACHERS))).stages[0], prompts=given.asked)
    rows = pairs_of(found, given.steps, given.prompts)
    best = {
        domain: max((row for row in rows if row["domain"] == domain), key=lambda row: row["gained"])["teacher"]
        for domain in domains
    }
    result = {
        "pairs": len(rows),
        "steps": given.steps,
        "spearman": correlation([row["signal"] for row in rows], [row["gained"] for row in rows]),
        "spearman_by_domain": {
            domain: correlation(
                [row["signal"] for row in rows if row["domain"] == domain],
                [row["gained"] for row in rows if row["domain"] == domain],
            )
            for domain in domains
        },
        "chosen": found.recommendation.teachers,
        "gained_most": best,
        "rows": rows,
    }
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(circumstances() | result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
