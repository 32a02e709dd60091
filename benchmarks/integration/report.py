"""The result file of an edition, and its figure. The file has every mark, so that all numbers can be computed again.

Schema (`schema: 1`): `split` report, or tune where only the tuning runs are told; `domains` {NAME: {worked, prompts, start, specialist}}; `start` and `specialists` {DOMAIN: marks};
`pairs` {"P3: ONE - OTHER": the difference of two arms: {value, low, high}}, which `--draw` computes and prints again; `arms` {NAME: {score: {value, low, high, by_seed, by_domain}, against_first, flops: {marginal, total}, tokens, seconds,
tuning: [{settings, score}], runs: [{seed, settings, marks, cost, curve, seconds}]}}. Marks are a text of 0 and 1, one per
prompt in the order of the report split. An entry, of this framework or another, is a file of DIRECTORY/entries: entry.schema.json.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from statistics import mean
from typing import Any

from integration.arms import ARMS, Arm
from integration.domains import EDITIONS, Split, read, right
from integration.editions import Edition
from integration.scores import Marks, flops, interval, pooled, share
from runs import save_figure

REFERENCES = ("start", "reference", "specialist", "joint")
PAIRS = {  # differences that predictions are about
    "P3": [
        ("opd-exact-reward", "opd-exact"),
        ("opd-sampled-reward", "opd-sampled"),
        ("opd-sampled-reward", "opd-exact"),
        ("opd-exact", "mixed-rl"),
        ("opd-sampled-reward", "mixed-rl"),
    ],
    "P4": [("opd-exact", "opd-topk"), ("opd-exact", "opd-sampled")],
    "P6": [("opd-exact-foreign", "opd-exact")],
    "P7": [("opd-exact", "sft-teacher")],
    "order": [("sft-teacher-opd", "opd-exact"), ("sft-teacher-opd", "sft-teacher")],
    "L4": [("cascaded-rl", "mixed-rl")],
    "L5": [("sft-gold-rl", "sft-gold")],
    "L6": [("opd-topk-reward", "opd-exact-reward")],
    "direction": [("opd-forward", "opd-exact"), ("opd-forward", "sft-teacher")],
    "shares": [("opd-need", "opd-exact"), ("opd-need", "sft-teacher"), ("opd-need", "mixed-rl")],
}
COSTS = ("prefill", "sampled", "scored", "trained", "rollouts")


def enter(edition: Edition, path: Path) -> Path:
    """A run of another framework: its answers marked, and put beside the other entries."""
    given = json.loads(path.read_text(encoding="utf-8"))
    missing = [key for key in ("arm", "seed", "split", "settings", "cost", "seconds", "answers") if key not in given]
    missing += [f"cost.{key}" for key in COSTS if key not in given.get("cost", {})]
    if missing:
        raise SystemExit(
            f"{path}: {', '.join(missing)} missing; benchmarks/integration/entry.schema.json has all fields."
        )
    marks = {}
    for domain in edition.domains:
        rows, answers = read(edition.data, domain, given["split"])[: edition.prompts], given["answers"].get(domain, [])
        if len(answers) != len(rows):
            raise SystemExit(
                f"{path}: {len(answers)} answers of {domain}, and {edition.data} has {len(rows)} questions of the {given['split']} split."
            )
        marks[domain] = "".join(str(int(right(text, row["answer"]))) for text, row in zip(answers, rows, strict=True))
    settings = sha256(json.dumps(given["settings"], sort_keys=True).encode()).hexdigest()[:8]
    to = edition.directory / "entries" / f"{given['arm']}-{settings}-{given['split']}-seed{given['seed']}.json"
    to.parent.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in given.items() if key != "answers"}
    to.write_text(json.dumps(kept | {"marks": marks}) + "\n", encoding="utf-8")
    return to


def entries(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((directory / "entries").glob("*.json"))]


def summarise(edition: Edition, start: Marks, specialists: Marks, split: Split = "report") -> dict[str, Any]:
    """Of the split for reporting; or of the tuning runs, one seed each, the best of every arm."""
    everything = entries(edition.directory)
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    tuning: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in everything:
        if entry["arm"].startswith(REFERENCES):
            continue
        if entry["split"] != split:
            tuning[entry["arm"]].append(entry)
        else:
            runs[_label(entry, edition)].append(entry)
    whole = [len(start[name]) for name in edition.domains]
    complete = {
        arm: kept
        for arm, found in runs.items()
        if (kept := [entry for entry in found if [len(entry["marks"][name]) for name in edition.domains] == whole])
    }
    if split == "tune":
        complete = {
            arm: [max(found, key=lambda entry: pooled(entry["marks"], start, specialists))]
            for arm, found in complete.items()
        }
    size = parameters(edition)
    made = {
        origin: sum(flops(entry["cost"], size, size) for entry in everything if entry["arm"] == f"specialist-{origin}")
        for origin in ("start", "foreign")
    }
    arms = {}
    equal = {arm: found for arm, found in complete.items() if "," not in arm}  # at equal FLOPs
    if not equal:
        raise SystemExit(
            f"no run of {edition.steps} steps on the {split} split in {edition.directory}: there is nothing to report yet"
        )
    first = max(equal, key=lambda arm: mean(pooled(entry["marks"], start, specialists) for entry in equal[arm]))
    for arm, found in sorted(complete.items()):
        marks = _marks(found)
        marginal = mean(flops(entry["cost"], size, size) for entry in found) if "cost" in found[0] else 0.0
        origin, ours = "foreign" if "-foreign" in arm else "start", _of_ours(arm)
        uses = found[0].get("specialists", True) if ours is None else ours.specialists
        arms[arm] = {
            "score": interval(marks, start, specialists),
            "against_first": interval(marks, start, specialists, against=_marks(complete[first])),
            "flops": {"marginal": marginal, "total": marginal + made[origin] if uses and made[origin] else marginal if not uses else None},
            "tokens": mean(entry["cost"]["sampled"] for entry in found) if "cost" in found[0] else 0,
            "seconds": mean(entry["seconds"] for entry in found),
            "tuning": [{"settings": one["settings"], "marks": one["marks"]} for one in tuning[arm]],
            "runs": found,
        }  # fmt: skip
    return {
        "schema": 1, "edition": edition.name, "split": split, "first": first, "start": start, "specialists": specialists,
        "domains": {
            name: {
                "worked": EDITIONS[edition.name][name].worked, "prompts": len(start[name]), "start": share(start[name]),
                "specialist": share(specialists[name]),
            } for name in edition.domains
        },
        "steps": edition.steps, "rollouts": edition.rollouts, "rates": edition.rates,
        "specialists_flops": {origin: spent or None for origin, spent in made.items()}, "pairs": pairs(complete, start, specialists), "arms": arms,
    }  # fmt: skip


def pairs(runs: dict[str, list[dict[str, Any]]], start: Marks, specialists: Marks) -> dict[str, dict[str, Any]]:
    """Differences of two arms with as many steps each; of P7 and of the order also in domains with worked and with short answers."""
    found = {}
    for name, one, other in ((name, *pair) for name, of in PAIRS.items() for pair in of):
        for ours in (label for label in runs if label.partition(",")[0] == one):
            theirs = ours.replace(one, other, 1)
            for which, domains in _parts(name, specialists) if theirs in runs else ():
                marks = [{domain: side[domain] for domain in domains} for side in (start, specialists)]
                label = f"{name}{which}: {ours} - {theirs}"
                found[label] = interval(_marks(runs[ours]), *marks, against=_marks(runs[theirs]))
    return found


def _parts(name: str, domains: Iterable[str]) -> list[tuple[str, list[str]]]:
    every = [("", list(domains))]
    if name not in ("P7", "order"):
        return every
    kinds = {domain: edition[domain].worked for edition in EDITIONS.values() for domain in edition}
    worked, short = ([domain for domain in every[0][1] if kinds[domain] == kind] for kind in (True, False))
    return [*every, (", worked", worked), (", short", short)] if worked and short else every


def _marks(runs: list[dict[str, Any]]) -> list[Marks]:
    """Seeds in order, so that a difference is drawn seed by seed."""
    return [entry["marks"] for entry in sorted(runs, key=lambda entry: int(entry["seed"]))]


def _label(entry: dict[str, Any], edition: Edition) -> str:
    """The arm; with its steps, where a run had more or fewer than the edition gives."""
    steps = entry["settings"].get("steps", edition.steps)
    return (
        entry["arm"] if _of_ours(entry["arm"]) is None or steps == edition.steps else f"{entry['arm']}, {steps} steps"
    )


def _of_ours(arm: str) -> Arm | None:
    """None: a merge, or of another framework."""
    return ARMS.get(arm.partition(",")[0].removesuffix("-foreign"))


def parameters(edition: Edition) -> int:
    return {"smol": 134_515_008, "tiny": 455_936}[edition.name]


def draw(found: dict[str, Any], name: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 0.36 * len(found["arms"]) + 1.4))
    ordered = sorted(found["arms"].items(), key=lambda item: item[1]["score"]["value"])
    for number, (_, entry) in enumerate(ordered):
        score = entry["score"]
        axis.plot([score["low"], score["high"]], [number, number], color="C0", linewidth=2, alpha=0.6)
        axis.plot(score["by_seed"], [number] * len(score["by_seed"]), "o", color="C0", markersize=3, alpha=0.6)
        axis.plot(score["value"], number, "s", color="C0", markersize=6)
    axis.axvline(0, color="0.6", linestyle=":", label="the start")
    axis.axvline(1, color="0.3", linestyle=":", label="the specialists")
    axis.set_yticks(range(len(ordered)), [arm for arm, _ in ordered])
    axis.set(xlabel="pooled normalised score, 95 % interval over seed, domain and prompt")
    save_figure(figure, axis, f"{name}.svg")
