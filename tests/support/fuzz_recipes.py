"""Recipes for the fuzz target: shipped ones with something done to them, and valid ones put together at random."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import yaml

from opd.recipe import shipped_recipes
from opd.recipe.plain_data import parse_yaml

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3.5, -0.5, 1e-30, 1e30, 1e308, 2**31, 2**63, 2**64 - 1, 10**31, float("nan"), float("inf"), -float("inf"),
    "", " ", "x", "0", "1e5", "nan", "true", "null", "..", "/", "~", "a/b", "tiny/generalist", "tiny/nothing", "task:addition", "task:nothing",
    "stage:main", "stage:nothing", "rows.jsonl", "no/such/dir", "org/name", "exact", "numeric", "os:system", "a.py:b", "direct", "plateau",
    "\u202e[/x]\x1b[31m", "é" * 300, "x" * 5000, "{}", "[", "&a", "!!int x", "2024-01-01", "1:30", "010",
    [], {}, [[]], [{}], {"": {}}, {"kind": "random"}, ["student"], [1, 2], [None], {"model": None}, {"value": 0}, {"a": {"b": {"c": 1}}},
]  # fmt: skip
TEXTS = ["\t", "\0", "- ", ": ", "{", "}", "[", "&a ", "*a", "!!set ", "#", "'", '"', "\\", "\ufeff", "%YAML 9.9\n", "---\n", "...\n", "<<: *a\n", "? ", "\x85", "\ud7ff"]  # fmt: skip


def shipped() -> dict[str, dict[str, Any]]:
    return {name: parse_yaml(path.read_text(encoding="utf-8"), name) for name, path in shipped_recipes().items()}


def places(node: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value."""
    own = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    return [place for key in own for place in [(node, key), *places(node[key])]]


def mutated(draw: random.Random, recipes: dict[str, dict[str, Any]]) -> bytes:
    """The text of a shipped recipe after one to four accidents, to its values or to its characters."""
    names = sorted(recipes)
    raw = copy.deepcopy(recipes[draw.choice(names)])
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        accident(draw, raw, recipes[draw.choice(names)])
    text = yaml.safe_dump(raw, sort_keys=False, allow_unicode=draw.random() < 0.5)
    if draw.random() < 0.15:
        text = scribbled(draw, text)
    data = text.encode("utf-8", "surrogatepass")
    if draw.random() < 0.03:
        spot = draw.randrange(len(data) + 1)
        data = data[:spot] + bytes([draw.randrange(256)]) + data[spot:]
    return data


def accident(draw: random.Random, raw: dict[str, Any], other: dict[str, Any]) -> None:
    found = places(raw)
    if not found:
        raw[draw.choice(["student", "prompts", "x"])] = draw.choice(ODD)
        return
    node, key = draw.choice(found)
    match draw.choice(
        [
            "replace",
            "replace",
            "kindred",
            "kindred",
            "kindred",
            "delete",
            "delete",
            "rename",
            "add",
            "cross",
            "wrap",
            "scale",
        ]
    ):
        case "replace":
            node[key] = copy.deepcopy(draw.choice(ODD))
        case "kindred":  # another value of the same type, or the value another recipe has under this key
            theirs = [(name, there[name]) for there, name in places(other)]
            same = [value for name, value in theirs if name == key or type(value) is type(node[key])]
            node[key] = copy.deepcopy(draw.choice(same or ODD))
        case "delete":
            del node[key]
        case "rename" if isinstance(node, dict):
            node[draw.choice([str(key) + "s", str(key)[:-1], "", "name", "é", "a.b"])] = node.pop(key)
        case "add":
            target = draw.choice([item for item in (raw, node[key], node) if isinstance(item, dict)] or [raw])
            target[draw.choice(KEYS)] = copy.deepcopy(draw.choice(ODD))
        case "cross":
            theirs, name = draw.choice(places(other))
            node[key] = copy.deepcopy(theirs[name])
        case "wrap":
            node[key] = draw.choice([[node[key]], {"x": node[key]}, [node[key], node[key]], str(node[key])])
        case "scale" if isinstance(node[key], (int, float)):
            node[key] = draw.choice(
                [-node[key], node[key] * 1_000_003, node[key] / 7, str(node[key]), 10 * node[key], bool(node[key])]
            )


def scribbled(draw: random.Random, text: str) -> str:
    lines = text.split("\n")
    spot = draw.randrange(len(lines))
    match draw.choice(["insert", "cut", "double", "shift"]):
        case "insert":
            where = draw.randrange(len(lines[spot]) + 1)
            lines[spot] = lines[spot][:where] + draw.choice(TEXTS) + lines[spot][where:]
        case "cut":
            return text[: draw.randrange(len(text) + 1)]
        case "double":
            lines.insert(spot, lines[spot])
        case "shift":
            lines[spot] = " " * draw.randint(1, 3) + lines[spot]
    return "\n".join(lines)


KEYS = [
    "student", "teachers", "prompts", "rollout", "sampler", "objective", "rewards", "train", "eval", "checkpoint", "store", "log", "hub",
    "seed", "device", "threads", "stages", "name", "model", "dtype", "lora", "revision", "domains", "role", "source", "limit", "options",
    "samples", "temperature", "top_p", "stop", "data_share", "teacher_share", "teacher_mix", "contrast", "form", "divergence", "beta", "alpha",
    "support", "k", "closure", "on", "coefficient", "advantage", "surrogate", "correction", "gate", "aggregate", "kind", "steps", "lr",
    "betas", "every", "metric", "early_stop", "commit_ms", "chat_template_kwargs", "data",
]  # fmt: skip


# Valid combinations


def combined(draw: random.Random, rows: Path) -> dict[str, Any]:
    """A recipe whose every part is fine by itself: two steps of tiny models on a few prompts."""
    maybe = draw.random
    raw: dict[str, Any] = {
        "student": {"model": "tiny/generalist", "dtype": draw.choice(["float32", "float32", "bfloat16"])},
        "prompts": [draw.choice([{"source": "task:addition", "domain": "arithmetic"}, {"source": str(rows), "domain": "arithmetic"}])],
        "rollout": rollout(draw),
        "objective": [term(draw) for _ in range(draw.choice([1, 1, 1, 2]))],
        "train": {
            "steps": 2, "lr": 1e-4, "epochs": draw.choice([1, 1, 2]), "minibatches": draw.choice([1, 1, 2]), "autocast": maybe() < 0.1,
            "clip": draw.choice([1.0, None]), "schedule": draw.choice(["constant", "linear", "cosine"]),
        },
        "eval": draw.choice([{"prompts": 0}, {"prompts": 2}, {"prompts": 2, "k": 2, "temperature": 0.7}, {"prompts": 2, "every": 1}]),
        "sampler": {"slots": 8, "dtype": draw.choice([None, None, "bfloat16"])},
        "device": "cpu",
        "seed": draw.randrange(1000),
    }  # fmt: skip
    if any(part["form"] == "cross_entropy" and "on" not in part for part in raw["objective"]) and maybe() < 0.8:
        raw["rollout"] |= {"data_share": 0.5} if len(raw["objective"]) > 1 else {"data_share": 1.0, "samples": 1}
    if any("reference" in str(part) or "extrapolation" in str(part) for part in raw["objective"]) or maybe() < 0.05:
        raw["teachers"] = {"start": {"model": "tiny/generalist", "role": "reference"}}
    if maybe() < 0.9:
        raw.setdefault("teachers", {})["arithmetic"] = "tiny/arithmetic"
    if maybe() < 0.2:
        raw["student"]["lora"] = {"rank": 2, "dropout": draw.choice([0.0, 0.1])}
    if maybe() < 0.2:
        raw["student"]["gradient_checkpointing"] = True
    if maybe() < 0.2:
        raw["prompts"].append({"source": "task:reverse", "domain": draw.choice(["arithmetic", "spelling"])})
    if maybe() < 0.3:
        raw["rewards"] = draw.choice(["numeric", "exact", ["exact", {"kind": "format", "pattern": "[0-9]+", "weight": 0.5}], {"arithmetic": "numeric"}])  # fmt: skip
    if maybe() < 0.15:
        raw["stages"] = [{"name": "one"}, {"name": "two", "train": {"steps": 1}}]
    return raw


def rollout(draw: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompts": 2,
        "samples": draw.choice([1, 2, 2]),
        "max_new_tokens": draw.choice([4, 6, 600]),
    }
    if draw.random() < 0.9:
        found["max_new_tokens"] = 4
    for key, values in (
        ("temperature", [1.0, 0.7, 0.0]), ("top_p", [0.9]), ("top_k", [5]), ("data_share", [0.5, 1.0]), ("teacher_share", [0.5, 1.0]),
        ("writers", [[{"kind": kind, "samples": 1}] for kind in ("data", "teacher", "rejected")]), ("teacher_mix", [0.2]), ("contrast", [1, 2]), ("stop", [["\n"]]), ("max_prompt_tokens", [3, 64]),
    ):  # fmt: skip
        if draw.random() < 0.08:
            found[key] = draw.choice(values)
    return found


def term(draw: random.Random) -> dict[str, Any]:
    form = draw.choice(["direct", "direct", "policy_gradient", "policy_gradient", "k2", "cross_entropy", "pairwise"])
    found: dict[str, Any] = {"form": form}
    if form == "direct":
        found["divergence"] = draw.choice(["reverse_kl", "forward_kl", "jsd", "skew_kl", "skew_reverse_kl", "alpha", "tvd", "hellinger", "acceptance"])  # fmt: skip
        if draw.random() < 0.4:
            found |= {
                "support": "topk", "k": draw.choice([1, 8, 1000]), "side": draw.choice(["teacher", "student", "union"]),
                "closure": draw.choice(["tail", "renormalised", "generalised", "none"]),
            }  # fmt: skip
        if draw.random() < 0.2:
            found["temperature"] = 2.0
    if form == "policy_gradient":
        found["advantage"] = draw.choice([
            {}, {"student": "current"}, {"student": "proximal"}, {"outcome_weight": 1.0}, {"teacher_weight": 0, "outcome_weight": 1.0, "std": True},
            {"extrapolation": 1.25}, {"discount": 0.9}, {"kl_baseline": True}, {"reference_weight": 0.1}, {"whiten": True}, {"clip": 2.0},
            {"outcome_weight": 1.0, "baseline": "batch", "overlong": "mask"}, {"outcome_weight": 1.0, "overlong": "penalise", "overlong_buffer": 2},
        ])  # fmt: skip
        found["surrogate"] = draw.choice(
            ["importance_sampling", "ppo", "cispo", "gspo", {"kind": "ppo", "against": "proximal"}]
        )
    if form == "pairwise":
        found |= {
            "preference": draw.choice(["dpo", "ipo", "orpo"]),
            "pairs": draw.choice(["best_worst", "all", "authors"]),
        }
        if draw.random() < 0.5:
            found |= {
                "chosen": draw.choice(["data", "teacher"]),
                "rejected": draw.choice(["student", "rejected", "data"]),
            }
    if draw.random() < 0.2:
        found["correction"] = draw.choice(["icepop", "tis", "mis", "prefix", {"kind": "none", "veto": 0.01}])
    if draw.random() < 0.3:
        found["gate"] = draw.choice([
            "correct", "wrong", "contrast", "finished", "entropy", "soft_or", "random", "paced", "perplexity", "selectkd", "turns",
            {"kind": "selectkd", "accept": "speculative"}, {"kind": "teacher_entropy", "below": 2.0}, ["finished", "random"],
        ])  # fmt: skip
        found["gated"] = draw.choice(["drop", "zero"])
    if draw.random() < 0.3:
        found["aggregate"] = draw.choice(["sequence_mean", "prompt_mean", "constant"])
    if draw.random() < 0.2:
        found["coefficient"] = draw.choice(
            [0.5, 0, {"value": 1, "to": 0.1, "over": 2}, {"after": 1}, {"until": 1}, {"until": "plateau"}]
        )
    if draw.random() < 0.2:
        found["on"] = draw.choice([["student"], ["data"], ["teacher"], ["student", "data"]])
    return found


# Pairs of mechanisms


PG = "policy_gradient"
OUTCOME = {"teacher_weight": 0, "outcome_weight": 1.0}
TERMS: dict[str, dict[str, Any]] = {
    **{kind: {"divergence": kind} for kind in ("forward_kl", "jsd", "skew_kl", "alpha", "tvd", "acceptance")},
    **{f"topk {closure}": {"support": "topk", "k": 8, "closure": closure} for closure in ("tail", "renormalised", "teacher_renormalised", "generalised", "none")},
    **{f"topk of {side}": {"support": "topk", "k": 8, "side": side, "with_sampled": True} for side in ("teacher", "student", "union")},
    "tempered": {"temperature": 2.0}, "shuffled": {"shuffle": "rollout"}, "prefix": {"correction": "prefix"},
    "candidates": {"form": "candidates", "k": 4}, "hpd": {"form": "hpd"}, "k2": {"form": "k2"}, "cross_entropy": {"form": "cross_entropy", "on": ["student"]},
    "pairwise": {"form": "pairwise"}, "gold": {"form": "gold"}, "uld": {"form": "uld"},
    **{kind: {"form": PG, "surrogate": kind} for kind in ("ppo", "cispo", "gspo", "trrd")},
    "decoupled": {"form": PG, "surrogate": {"kind": "ppo", "against": "proximal"}},
    **{kind: {"form": PG, "correction": kind} for kind in ("tis", "mis", "icepop")},
    **{f"student {whose}": {"form": PG, "advantage": {"student": whose}} for whose in ("proximal", "current")},
    "outcome": {"form": PG, "advantage": OUTCOME}, "both": {"form": PG, "advantage": {"outcome_weight": 1.0}},
    **{f"advantage {key}": {"form": PG, "advantage": {key: value}} for key, value in (
        ("kl_baseline", True), ("whiten", True), ("whiten", "group"), ("shuffle", "batch"), ("shuffle", "rollout"), ("clip", 1.0), ("extrapolation", 1.25),
        ("reference_weight", 0.1))},
    "returns": {"form": PG, "advantage": {"discount": 0.9, "future_only": True, "add_own": True}},
    **{kind: {"form": PG, "advantage": {"teacher_weight": 0, "also": kind}} for kind in ("fixed", "ketchup", "magnitude", "turns", "anchor_rank", "gae", "score")},
    **{kind: {"form": kind} for kind in ("value", "representation", "dskd")},
    **{kind: {"form": "pairwise", "preference": kind} for kind in ("ipo", "orpo")},
    "detached": {"divergence": "skew_reverse_kl", "detached": True}, "probing": {"form": PG, "advantage": {"teacher_weight": 0, "also": "probing"}},
    "shaped": {"form": PG, "surrogate": "shaped", "on": ["data"], "advantage": {**OUTCOME, "baseline_of": "all"}},
    "authors": {"form": "pairwise", "pairs": "authors", "chosen": "data", "rejected": "student"},
    "adapt": {"divergence": "skew_kl", "adapt": True}, "domains": {"domains": ["arithmetic"]},
    **{f"gate {kind}": {"gate": kind} for kind in (
        "correct", "all_wrong", "contrast", "finished", "entropy", "unlikely", "soft_or", "random", "paced", "perplexity", "selectkd", "trust", "drift", "keep",
        "turns", "all_correct", "best_of_group")},
    "gate osd": {"gate": {"kind": "selectkd", "accept": "speculative", "accepted": 0, "rejected": 1}},
    "gate draws": {"gate": {"kind": "selectkd", "accept": "speculative", "draws": 3}},
    "gate tokens": {"gate": {"kind": "tokens", "ids": [5]}}, "gate length": {"gate": {"kind": "length", "shortest": 0.3}},
    "gate trust entropy": {"gate": {"kind": "trust", "by": "entropy"}}, "gate teacher_entropy": {"gate": {"kind": "teacher_entropy", "below": 2.0}},
    "gated zero": {"gated": "zero"}, "on student": {"on": ["student"]}, "on data": {"on": ["data"]}, "constant": {"aggregate": "constant", "denominator": 9.0},
    "sequence_mean": {"aggregate": "sequence_mean"}, "until": {"coefficient": {"until": 1}},
}  # fmt: skip
DIALOGUE: dict[str, Any] = {
    "prompts": [{"source": "task:dialogue", "domain": "arithmetic"}], "rollout": {"max_new_tokens": 40, "environment": {"kind": "dialogue", "turn_tokens": 4}},
}  # fmt: skip
GRID: dict[str, Any] = {
    "prompts": [{"source": "task:grid", "domain": "arithmetic", "options": {"size": 3, "walls": 1}}],
    "rollout": {"max_new_tokens": 40, "environment": {"kind": "grid", "turns": 4, "turn_tokens": 3}},
}  # fmt: skip
AROUND: dict[str, dict[str, Any]] = {
    **{f"{key} {value}": {"rollout": {key: value}} for key, value in (
        ("temperature", 0.7), ("temperature", 0.0), ("top_p", 0.9), ("top_k", 5), ("samples", 1), ("data_share", 0.5), ("data_share", 1.0), ("teacher_share", 0.5),
        ("teacher_mix", 0.2), ("contrast", 2))},
    **{f"{kind} in groups": {"rollout": {"writers": [{"kind": kind, "samples": 1}]}} for kind in ("data", "teacher", "rejected")},
    "replay": {"rollout": {"writers": [{"kind": "replay", "share": 0.5}]}}, "ahead": {"rollout": {"staleness": 1}},
    "shown": {"rollout": {"writers": [{"kind": "shown", "share": 0.5, "view": {"kind": "instruction", "instruction": "Short."}}]}},
    "rescue": {"rollout": {"rescue": {"view": {"kind": "template", "template": "{answer} {prompt}"}}}},
    "experience": {"rollout": {"experience": {}}}, "overlap": {"log": {"overlap": 4}},
    "teacher prefix": {"rollout": {"teacher_prefix": {"tokens": 2}}},
    **{cut: {"rollout": {"demonstrations": {"below": 0.5, "cut": cut, "by": {"kind": "format", "pattern": "^[0-4]*$"}}}} for cut in ("lines", "tokens")},
    "growing": {"rollout": {"length_schedule": {"kind": "line", "start": 2}}}, "matched": {"rollout": {"length_schedule": {"kind": "matched", "start": 2}}},
    "segments": {"rollout": {"segment": 2}},
    "shares": {"rollout": {"data_share": 1.0, "share_schedule": {"kind": "line", "to": {"data_share": 0.0}}}},
    **{f"{kind} of turns": {"prompts": [{"source": "task:dialogue", "domain": "arithmetic"}],
                            "rollout": {"max_new_tokens": 40, "environment": {"kind": "dialogue", "turn_tokens": 4, **more}}}
       for kind, more in (("keep", {}), ("split", {"history": "split"}), ("curriculum", {"curriculum": "forward"}))},
    **{f"curriculum {kind}": {"prompts": [{"source": "task:addition", "domain": "arithmetic", "limit": 32}], "curriculum": kind} for kind in ("kl", "overlap", "pass_rate")},
    "takeover": {**DIALOGUE, "rollout": {**DIALOGUE["rollout"], "takeover": {"turn": 1, "attempts": 1}}},
    "advice": {**GRID, "rollout": {**GRID["rollout"], "takeover": {"by": "environment"}}}, "oracle": {**GRID, "rollout": {**GRID["rollout"], "writers": [{"kind": "oracle", "share": 0.5}]}},
    "tools": {"rollout": {"max_new_tokens": 40, "environment": {"kind": "calculator", "tool_calls": "xml", "turns": 2, "turn_tokens": 8}}},
    **{f"made {into}": {"stages": [{"name": "make", "train": {"learn": False}}, {"name": "use", "prompts": [{"source": "stage:make", "turn_into": into, "where": {"finished": False}, **more}]}]}
       for into, more in (("completion", {}), ("messages", {"ask": "Again."}), ("text", {"ask": " = ", "ask_wrong": " no, "}))},
    "made answers": {"stages": [{"name": "make", "train": {"learn": False}}, {"name": "use", "prompts": [{"source": "stage:make"}]}]},
    "two stages": {"stages": [{"name": "one"}, {"name": "two", "student": "stage:one"}]},
    "led by the loss": {"rollout": {"data_share": 1.0, "share_schedule": {"kind": "validation_loss"}}, "eval": {"prompts": 2, "every": 1, "loss": True}},
    "shares by gap": {"shares": "gap"}, "muon": {"train": {"optimiser": "muon"}},
    **{kind: {"teachers": {"arithmetic": {"kind": kind}}} for kind in ("ema", "refresh")},
    **{f"view {view['kind']}": {"teachers": {"arithmetic": {"kind": "self", "view": view}}, "rewards": "numeric"} for view in (
        {"kind": "sibling"}, {"kind": "feedback"}, {"kind": "revision", "correct": " right, again ", "wrong": " wrong, again "})},
    **{kind: {"modules": {name: {"kind": kind}}} for kind, name in (
        ("head", "value"), ("projectors", "spaces"), ("discriminator", "judge"), ("reward_model", "judge"))},
    "no rewards": {"prompts": [{"source": "task:addition", "domain": "arithmetic"}, {"source": "task:reverse", "domain": "spelling"}]},
    "epochs": {"train": {"epochs": 2}}, "minibatches": {"train": {"minibatches": 2}}, "mixed": {"train": {"precision": "autocast"}},
    "lora": {"student": {"lora": {"rank": 2}}}, "no teacher": {"teachers": {}},
    "mixture": {"teachers": {"arithmetic": {"kind": "mixture", "parts": {"a": "tiny/arithmetic", "b": "tiny/generalist"}}}},
    "self": {"teachers": {"arithmetic": {"kind": "live", "view": {"kind": "template", "template": "{prompt}={answer} {prompt}"}}}},
    "bytes": {"teachers": {"arithmetic": {"model": "tiny/pairs", "view": "bytes"}}},
    "reference": {"teachers": {"arithmetic": "tiny/arithmetic", "start": {"model": "tiny/generalist", "role": "reference"}}},
}  # fmt: skip


def paired(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Two mechanisms in one recipe of one step, and their names. Terms of different forms stand side by side."""
    names = draw.sample([*TERMS, *AROUND], 2)
    raw: dict[str, Any] = {
        "student": {"model": "tiny/generalist"}, "teachers": {"arithmetic": "tiny/arithmetic"},
        "prompts": [{"source": "task:addition", "domain": "arithmetic"}], "rollout": {"prompts": 2, "samples": 2, "max_new_tokens": 4},
        "train": {"steps": 1, "lr": 1e-4}, "eval": {"prompts": 0}, "sampler": {"slots": 8}, "device": "cpu", "log": {"start_table": False},
    }  # fmt: skip
    terms: list[dict[str, Any]] = []
    for name in names:
        for section, settings in AROUND.get(name, {}).items():
            mixes = isinstance(settings, dict) and section not in ("teachers", "curriculum")
            raw[section] = {**raw.get(section, {}), **settings} if mixes else settings
        if name in TERMS:
            terms.append(copy.deepcopy(TERMS[name]))
    if len(terms) == 2 and ("form" not in terms[0] or "form" not in terms[1] or terms[0]["form"] == terms[1]["form"]):
        terms = [joined(*terms)]
    if terms:
        raw["objective"] = terms
    return " and ".join(names), raw


def joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Both terms' settings in one; gates add up."""
    both = {**one, **other}
    if isinstance(one.get("advantage"), dict) and isinstance(other.get("advantage"), dict):
        both["advantage"] = {**one["advantage"], **other["advantage"]}
    if "gate" in one and "gate" in other:
        both["gate"] = [one["gate"], other["gate"]]
    return both
