"""The numbers that README.md, docs/performance.md and docs/evidence quote, computed from results/.

    python benchmarks/quoted.py                 # prints every quoted line, page by page
    python benchmarks/quoted.py --check         # says which of them are not on their page

A line is quoted where the page contains it, letter for letter. tests/whole/test_evidence.py checks every page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parent.parent
STUDIES = ("tiny", "smol", "smol-rest", "smol-long", "smol-more", "smol-strong")
PHASES = ("sample", "score", "update")
DRIFT = ("solved", "right_clean", "right_after", "kl", "kl_clean", "kl_after", "kl_oracle")  # columns of its tables


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def performance() -> Iterator[str]:
    cases, lora = result("step-cuda")["cases"], result("step-lora-cuda")["runs"]
    rows = {
        "512 new tokens each": cases["equal"],
        "long-tailed answers, mean a quarter of the longest": cases["ragged"],
        "SmolLM2-135M's shape, 8 teachers, 128 prompts of 60 to 160 tokens, about 6 new tokens each": cases["smol"],
    }
    rows |= {f"LoRA of rank 32, torch limited to 24 GiB: {name}": run["cases"]["lora"] for name, run in lora.items() if "cases" in run}  # fmt: skip
    for name, case in rows.items():
        times = " | ".join(f"{case['seconds'][phase]:.2f}" for phase in (*PHASES, "total"))
        peak = max(case["peak_gib"].values())
        yield f"| {name} | {times} | {peak:.{0 if peak > 20 else 1}f} GiB |"
    products = result("step-curves")["products"]
    parts = [products[phase] for phase in PHASES]
    yield (
        "| matrix products of the first row alone | "
        + " | ".join(f"{one:.2f}" for one in (*parts, sum(parts)))
        + " | |"
    )
    yield f"{result('sampler-cuda')['graphs']['tokens_per_s']:,} tokens a second"
    steps = result("decode-cuda")["steps"]
    for layers, form in (
        ("drawing by kernels as well", "{:.2f} ms at the 0.6B shape and {:.2f} ms at 135M"),
        ("layers and drawing of the classes", "{:.2f} and {:.2f} ms"),
    ):
        yield form.format(*(steps[f"{size}, 64 slots"][layers]["milliseconds"] for size in ("0.6B", "135M")))
    yield from divergences()
    yield from pool()
    yield from on_a_cpu()


def agents() -> Iterator[str]:
    rates = result("episodes")["tokens_per_second"]
    first, second = (slow / instant for slow, instant in zip(rates["slow"], rates["instant"], strict=True))
    yield f"{first:.2f} and {second:.2f} times those with an instant tool"


def drift() -> Iterator[str]:
    for models in result("agents")["worlds"].values():
        yield from drift_rows(models)
    yield from drift_rows(longer := result("agents-long")["worlds"]["grid"])
    late = [f"{of_arm(longer, arm, 'kl_late'):.2f}" for arm in ("first turn", "all turns", "forward")]
    yield f"its late KL is {late[0]} ({late[1]} with *all turns*, {late[2]} with *forward*)"
    grid, dialogue = (result("agents")["worlds"][world] for world in ("grid", "dialogue"))
    start = grid["start"]["summary"]
    yield f"{start['kl_after'] / start['kl_clean']:.2f} times as high"
    yield f"right {start['right_clean']:.2f} of the time before it and {start['right_after']:.2f} after it"
    yield f"{start['kl'] / start['kl_oracle']:.2f} times the KL after the oracle's turns"
    yield f"from {start['teacher_first_clean']:.2f} to {start['teacher_first_after']:.2f}"
    first, every = (of_arm(grid, arm, "kl_late") for arm in ("first turn", "all turns"))
    yield f"{first:.2f} at {start['kl_late']:.2f} of the start ({every:.2f} with *all turns*)"
    yield f"{of_arm(grid, 'all turns', 'kl_after') / of_arm(grid, 'all turns', 'kl_clean'):.2f} times"
    solved = {arm: [run["summary"]["solved"] for run in runs] for arm, runs in grid["arms"].items()}
    later = {arm: [run["summary"]["solved"] for run in runs] for arm, runs in longer["arms"].items()}
    yield f"solves {mean(solved['one turn']) - mean(solved['all turns']):.2f} fewer than *one turn*"
    yield f"*forward* solves {mean(solved['forward']) - mean(solved['all turns']):.2f} more"
    for scores, arms in (
        (solved, ("forward", "backward", "first turn", "one turn", "score")),
        (later, ("forward", "first turn")),
    ):
        for arm in arms:
            points = [100 * (one - other) for one, other in zip(scores[arm], scores["all turns"], strict=True)]
            by_seed = ", ".join(f"{one:+.0f}" for one in points)
            yield f"*{arm}* {mean(points):+.0f} ({by_seed})".replace("-", "−")
    played = result("agents-untrained")["worlds"]
    science, repair = (
        f"{played[world]['rewarded']} of {played[world]['episodes']}" for world in ("scienceworld", "repair")
    )
    yield f"a reward in {science} episodes of ScienceWorld"
    yield f"and in {repair} of code repair"
    begun = dialogue["start"]["summary"]
    yield f"{begun['kl_after'] / begun['kl_clean']:.2f} times as high after a mistake"
    yield " and ".join(f"{of_arm(dialogue, arm, 'right'):.2f}" for arm in ("first turn", "all turns"))


def drift_rows(models: Any) -> Iterator[str]:
    for name, runs in {"start": [models["start"]], "teacher": [models["teacher"]], **models["arms"]}.items():
        found = {key: [run["summary"][key] for run in runs] for key in runs[0]["summary"]}
        cells = {key: f"{mean(values):.2f}" for key, values in found.items()}
        for key in ("solved", "kl"):
            if len(runs) > 1:
                cells[key] += f" ({min(found[key]):.2f} to {max(found[key]):.2f})"
        steps = f"{mean(run['steps'] for run in runs):.0f}" if "steps" in runs[0] else ""
        yield f"| {name} | {steps} | {' | '.join(cells[key] for key in DRIFT)} |"


def of_arm(models: Any, arm: str, key: str) -> float:
    return mean(run["summary"][key] for run in models["arms"][arm])


def divergences() -> Iterator[str]:
    names = {
        "opd fast": "opd, fastest", "opd budget": "opd, limited to 1.3 GiB", "opd small": "opd, least memory",
        "Liger": "Liger 0.8.5, chunked (logits in bf16)", "Liger, rows in a kernel, fp32 sums": "Liger 0.8.5, fp32 logits",
        "TRL": "TRL 1.16, chunked", "naive torch": "plain torch (logits in bf16)",
    }  # fmt: skip
    for row in result("divergence-cuda")["rows"]:
        if row["ds"] == 1024 and row.get("kind") == "reverse_kl":
            error = f"{row['gradient_error']:.1%}".replace("%", " %")
            yield f"| {names[row['implementation']]} | {row['ms']:.1f} | {row['peak_gib']:.2f} | {error} |"
        elif row["ds"] == 1024 and row["implementation"] == "products alone":
            yield f"| the four matrix products alone | {row['ms']:.1f} | | |"
    topk = result("topk-cuda")["milliseconds"]
    yield f"{topk['top-k of the teacher']:.1f} ms against {topk['full vocabulary']:.1f} for the full vocabulary"


def divergence_table() -> Iterator[str]:
    """By implementation: milliseconds back to back and after a pause, for two widths of the student and three divergences."""
    names = {
        "opd fast": "*fast*", "opd budget": "*fast*, `memory` 1.3 / 2.2 GiB", "opd small": "*small*, `memory` 0.88 / 1.4 GiB",
        "TRL": "TRL 1.16 chunked", "Liger": "Liger 0.8.5 chunked, `torch.compile`", "naive torch": "naive torch",
        "Liger, rows in a kernel, fp32 sums": "Liger, `LigerFusedLinearJSD`, `accum_dtype` fp32",
    }  # fmt: skip
    found = result("divergence-cuda")["rows"]
    for name, words in names.items():
        rows = [row for row in found if row["implementation"] == name]
        cells = [f"{row['ms']:.1f} ({row['ms_rested']:.1f})" for row in sorted(rows, key=lambda row: row["ds"])]
        peaks = (max(row["peak_gib"] for row in rows if row["ds"] == width) for width in (1024, 2048))
        yield f"| {words} | {' | '.join(cells)} | {' / '.join(f'{peak:.2f}' for peak in peaks)} | {max(row['gradient_error'] for row in rows):.1e} |"


def asynchronous() -> Iterator[str]:
    for row in result("async-cpu")["rows"]:
        cells = [
            row["arm"],
            f"{row['mean']:.3f}",
            f"{row['kl']:.3f}",
            f"{row['lag']:.2f}, {row['lag_max']}",
            f"{row['length']['mean']:.3f}",
        ]
        yield f"| {' | '.join(cells)} | {row['wait_s']:.1f} s | {row['tokens_per_s']:,.0f} |"
    waits = [f"{row['wait_s']:.0f}" for row in result("async-thread-cpu")["rows"]]
    yield f"waited {waits[0]} s at 0 and {', '.join(waits[1:-1])} and {waits[-1]} s"


def pool() -> Iterator[str]:
    one, two = (result("teacher-pool-cuda")["arms"][name] for name in ("one", "two"))
    yield f"| seconds per step | {one['seconds']:.2f} | {two['seconds']:.2f} |"
    yield f"| device memory, GB | {one['device_peak_bytes'] / 1e9:.1f} | {two['device_peak_bytes'] / 1e9:.1f} |"
    yield f"| peak host memory, GB | {one['peak_bytes'] / 1e9:.1f} | {two['peak_bytes'] / 1e9:.1f} |"
    yield f"| seconds until the first step | {one['start_seconds']:.0f} | {two['start_seconds']:.0f} |"


def on_a_cpu() -> Iterator[str]:
    medians = result("step-x86-cpu")["comparisons"][0]["medians"]
    for name, form in (("opd", "{} CPU-seconds, {} GiB"), ("trl", "{}, {} GiB")):
        median = medians[name]
        yield form.format(f"{median['cpu']['total']:.1f}", f"{median['peak_increase'] / 2**30:.1f}")
    for name in ("x86_64", "x86_64-busy", "aarch64"):
        runs = result(f"quickstart-{name}-cpu")["runs"]
        yield ", ".join(f"{run['cpu_seconds']:.0f}" for run in runs) + " CPU-seconds"
    waits = {row["arm"]: row["wait_s"] for row in result("async-cpu")["rows"]}
    yield f"trainer waits {waits['1']:.1f} s | in turns: {waits['0']:.0f} s"
    served = result("served-teacher-cpu")
    yield f"{served['cpu_ratio']:.2f}x the CPU-seconds of in-process, {served['bytes_per_token']['hidden states']:,.0f} bytes per token"
    store = result("store-overhead-cpu")
    yield f"{100 * store['direct_median']:.2f} % counted directly; {100 * store['paired_mean']:.1f} % ± {100 * store['paired_stderr']:.1f} %"
    index = result("store-index-cpu")
    yield f"{index['cpu_s']} CPU-seconds, {index['peak_gb']} GB"


def readme() -> Iterator[str]:
    """Of exact OPD on SmolLM2 at three budgets; then what it is compared with."""
    main, long, more, strong, tiny = (
        result(f"integration-{name}") for name in ("smol", "smol-long", "smol-more", "smol-strong", "tiny")
    )
    seeds = {2: "two seeds", 3: "three seeds"}
    scores = [score(one, "opd-exact") for one in (main, long, more)]
    cost = [
        one["arms"]["opd-exact"]["flops"]["marginal"] / one["specialists_flops"]["start"] for one in (main, long, more)
    ]
    yield f"{scores[0]} at {cost[0]:.1f} times the specialists' cost, {scores[1]} at {cost[1]:.1f} times ({seeds[3]} each), {scores[2]} at {cost[2]:.1f} times ({seeds[2]})"
    yield f"OPD {score(strong, 'opd-exact')}, SFT on their answers {score(strong, 'sft-teacher')} (one seed)"
    gaps = [pair(one, "P7: opd-exact - sft-teacher", 2)[0] for one in (main, long, more)]
    yield f"{gaps[0]}, {gaps[1]} and {gaps[2]} at the first three budgets"
    yield f"{score(long, 'opd-sampled')} against {score(long, 'opd-exact')} (one seed, three seeds)"
    yield f"{score(tiny, 'opd-sampled')} against {score(tiny, 'opd-exact')} (five seeds)"
    for name, words in (("tiny", "on tiny models"), ("smol", "on SmolLM2")):
        levels = result(f"headline-{name}")["levels"].values()
        factors = [level["arms"]["exact-gold"]["tokens_factor"]["value"] for level in levels]
        yield (
            f"{min(factors):.1f} to {max(factors):.1f} times fewer {words}"
            if name == "tiny"
            else f"{min(factors):.1f} to {max(factors):.1f} times {words}"
        )
    yield f"no: {score(long, 'merge-average')}"


COLUMNS = {  # of the table of differences: studies, and what steps add to the names of arms
    "tiny": [("tiny", "")], "70 steps": [("smol", ""), ("smol-rest", ""), ("smol-long", ", 70 steps")],
    "200 steps": [("smol-long", ""), ("smol-more", ", 200 steps")], "400 steps": [("smol-more", "")], "strong": [("smol-strong", "")],
}  # fmt: skip
BUDGETS = [  # study, exact OPD, SFT on the specialists' answers
    ("smol", "opd-exact", "sft-teacher"), ("smol-rest", "opd-exact", ""), ("smol-long", "opd-exact", "sft-teacher"),
    ("smol-more", "opd-exact, 200 steps", ""), ("smol-strong", "opd-exact", "sft-teacher"), ("smol-long", "opd-exact, 400 steps", ""),
    ("smol-more", "opd-exact", "sft-teacher"),
]  # fmt: skip
COMPARISONS = {  # what a difference says, and its name in the result files
    "exact OPD − SFT on the specialists' answers": "P7: opd-exact - sft-teacher",
    "the same, worked domains": "P7, worked: opd-exact - sft-teacher",
    "the same, short answers": "P7, short: opd-exact - sft-teacher",
    "OPD with forward KL − exact OPD": "direction: opd-forward - opd-exact",
    "OPD with forward KL − SFT on the specialists' answers": "direction: opd-forward - sft-teacher",
    "exact OPD − top 16": "P4: opd-exact - opd-topk",
    "exact OPD − sampled token": "P4: opd-exact - opd-sampled",
    "shares that follow the gap − exact OPD": "shares: opd-need - opd-exact",
    "SFT on their answers, then OPD − exact OPD": "order: sft-teacher-opd - opd-exact",
    "exact OPD − mixed RL": "P3: opd-exact - mixed-rl",
    "exact OPD with reward (a quarter of the prompts) − exact OPD": "P3: opd-exact-reward - opd-exact",
    "sampled token with reward (a quarter of the prompts) − sampled token": "P3: opd-sampled-reward - opd-sampled",
    "top 16 with reward − exact OPD with reward": "L6: opd-topk-reward - opd-exact-reward",
    "RL one domain after the other − mixed RL": "L4: cascaded-rl - mixed-rl",
    "gold, then RL − gold": "L5: sft-gold-rl - sft-gold",
    "specialists of foreign origin − of the same start": "P6: opd-exact-foreign - opd-exact",
}


def specialists() -> Iterator[str]:
    studies = {name: result(f"integration-{name}") for name in STUDIES}
    for study in studies.values():
        for when in ("start", "specialist"):
            yield ", ".join(f"{domain[when]:.2f}" for domain in study["domains"].values())
        for arm, entry in sorted(study["arms"].items(), key=lambda item: -item[1]["score"]["value"]):
            yield arm_row(arm, entry)
    for name, arm, other in BUDGETS:
        study = studies[name]
        entry = study["arms"][arm]
        ratio = entry["flops"]["marginal"] / study["specialists_flops"]["start"]
        cells = [
            f"{ratio:.2f}",
            str(len(entry["runs"])),
            score(study, arm, interval=True),
            score(study, other, interval=True) if other else "",
        ]
        yield f"| {' | '.join(cells)} |"
    for words, name in COMPARISONS.items():
        yield f"| {words} | " + " | ".join(differences(studies, name, of) for of in COLUMNS.values()) + " |"


def differences(studies: dict[str, Any], name: str, of: list[tuple[str, str]]) -> str:
    """One cell: the comparison in every study of a column. `steps` is part of an arm's name if they are not the study's."""
    kind, arms = name.split(": ")
    names = [(study, f"{kind}: " + " - ".join(arm + steps for arm in arms.split(" - "))) for study, steps in of]
    return "; ".join(" ".join(pair(studies[study], key)) for study, key in names if key in studies[study]["pairs"])


def arm_row(arm: str, entry: Any) -> str:
    """Arm, seeds, score, by domain, learning rate, rows trained on, tokens sampled."""
    runs, (name, comma, steps) = entry["runs"], arm.partition(",")
    value = score({"arms": {arm: entry}}, arm, interval=True)
    domains = ", ".join(f"{one:.2f}" for one in entry["score"]["by_domain"].values()).replace("-", "−")
    cells = [f"`{name}`{comma}{steps}", str(len(runs)), value, domains]
    if rate := runs[0]["settings"].get("lr"):
        cells += [f"{rate:g}", f"{runs[0]['cost']['rollouts'] / 1000:.0f}k", f"{entry['tokens'] / 1000:,.0f}k"]
    else:
        cells += ["–"] * 3
    return f"| {' | '.join(cells)} |"


def score(study: Any, arm: str, interval: bool = False) -> str:
    found = study["arms"][arm]["score"]
    bounds = f" [{found['low']:.3f}, {found['high']:.3f}]" if interval else ""
    return f"{found['value']:.3f}{bounds}".replace("-", "−")


def pair(study: Any, name: str, digits: int = 3) -> tuple[str, str]:
    """A difference of two arms, with a sign, and its interval."""
    found = study["pairs"][name]
    bounds = f"[{found['low']:.{digits}f}, {found['high']:.{digits}f}]"
    return f"{found['value']:+.{digits}f}".replace("-", "−"), bounds.replace("-", "−")


def rl() -> Iterator[str]:
    for name, teacher in (("tiny", "gold"), ("tiny-sparse", "gold"), ("tiny-rl", "rl"), ("smol", "gold")):
        study = result(f"headline-{name}")
        arms = [f"exact-{teacher}", f"sampled-{teacher}", f"sft-teacher-{teacher}", "sft-gold"]
        for level, entry in study["levels"].items():
            cells = [
                f"{100 * float(level):.0f} %",
                f"{entry['score']:.2f}",
                f"{entry['arms']['grpo']['tokens'] / 1000:.1f}k",
            ]
            yield f"| {' | '.join(cells + [times(entry['arms'][arm], study['seeds']) for arm in arms])} |"
        ends = [
            f"{mean(mean(score for _, score in run[-3:]) for run in study['curves'][arm]):.2f}"
            for arm in ("grpo", *arms)
        ]
        yield f"| end | | | {' | '.join(ends[1:])} |"
        yield f"GRPO ends at {ends[0]}"
    finals = {name: entry["final"] for name, entry in result("opd-vs-rl")["methods"].items()}
    yield f"| one sample per prompt | {finals['OPD, 1 sample']:.3f} |"
    yield f"| eight samples of an eighth of the prompts | {finals['OPD, 8 samples']:.3f} |"
    yield f"| eight samples of an eighth of the prompts, and the reward | {finals['sum']:.3f} |"
    yield f"GRPO with a rate of 1e-4 ends at {finals['GRPO']:.3f}"
    for name, weight in result("beyond-teacher")["outcome_weights"].items():
        words = (
            name
            if name == "reward alone"
            else f"teacher, reward with weight {name}"
            if name != "0"
            else "teacher alone"
        )
        yield f"| {words} | {weight['mean']:.3f} | {', '.join(f'{one:.3f}' for one in weight['by_seed'])} |"


def times(entry: Any, seeds: int) -> str:
    """How many times as many sampled tokens RL takes; a seed that missed the level makes it a bound, or unknown."""
    factor = entry["tokens_factor"]
    if entry["censored"]:
        return f"missed by {entry['censored']} of {seeds} seeds"
    high = f"{factor['high']:.1f}" if factor["high"] else ""
    return f"{'at least ' if factor['at_least'] else ''}{factor['value']:.1f}x [{factor['low']:.1f}, {high}]"


def labs() -> Iterator[str]:
    for lab, entry in result("labs-cpu")["labs"].items():
        again = result("labs-arm")["labs"].get(lab, {"outcomes": {}})["outcomes"]
        for found in entry["outcomes"].values():
            yield spread(found)
        for found in again.values():
            yield spread(found)
    for found in result("labs-mimo-strong")["labs"]["labs/mimo-v2-flash"]["outcomes"].values():
        yield spread(found)


def spread(found: Any, digits: int = 3) -> str:
    return f"{found['value']:.{digits}f} [{found['low']:.{digits}f}, {found['high']:.{digits}f}]".replace("-", "−")


def small_studies() -> Iterator[str]:
    for name, method in result("horizon")["methods"].items():
        means = [mean(column) for column in zip(*method["regret_by_seed"], strict=True)]
        words = {
            "on-policy": "student, reverse KL",
            "on-policy, forward KL": "student, forward KL",
            "off-policy": "teacher, forward KL (cloning)",
        }
        yield f"| {words[name]} | {means[0]:.3f} | {means[1]:.3f} | {means[2]:.2f} |"
    for name, row in result("recovery")["table"].items():
        learnt, last = name.split(", recovery by ")
        cells = [spread(row[key], 2) for key in ("left_of_peak", "after_of_peak", "worst_domain")]
        yield f"| {learnt.upper()} | {last.upper()} | {' | '.join(cells)} | {row['kept_the_promise']} of 3 |"
    disputes = result("disputes")
    for name, found in disputes["ledger"].items():
        ours, theirs = (f"{disputes['scores'][found[side]]['value']:.3f}" for side in ("ours", "theirs"))
        yield f"| {name} | {ours} | {theirs} | {spread(found)} |"
    for defect, entry in result("defects")["defects"].items():
        for method, found in entry["methods"].items():
            if defect != "hackable":
                yield f"| {defect} | {method} | {entry['teacher']:.2f} | {spread(found['rate'], 2)} |"
    for teachers, entry in result("gradient-variance")["teachers"].items():
        yield (
            f"| {teachers} | "
            + " | ".join(f"{row['noise']:.{2 if teachers == '1' else 1}f}" for row in entry.values())
            + " |"
        )
    for teachers, entry in result("added-teachers")["teachers"].items():
        first = mean(row["arithmetic"] for row in entry["scores"])
        untaught = f"{entry['untaught']['value']:.3f}" if entry["untaught"] else ""
        yield f"| {teachers} | {spread(entry['mean'])} | {first:.3f} | {untaught} |"


def findings() -> Iterator[str]:
    main, long, more, strong, tiny = (
        result(f"integration-{name}") for name in ("smol", "smol-long", "smol-more", "smol-strong", "tiny")
    )
    for study in (main, long, more, strong):
        yield score(study, "opd-exact", interval=True)
        yield " ".join(pair(study, "P7: opd-exact - sft-teacher"))
    yield score(strong, "sft-teacher", interval=True)
    yield score(strong, "sft-gold", interval=True)
    for study in (tiny, main):
        yield " ".join(pair(study, "P3: opd-exact - mixed-rl"))
    for study, words in ((tiny, "tiny "), (long, "SmolLM2 ")):
        yield f"{words}{score(study, 'sft-gold')} against {score(study, 'opd-exact')}"
        for other in ("opd-sampled", "opd-topk"):
            found = study["pairs"][f"P4: opd-exact - {other}"]
            turned = {"value": -found["value"], "low": -found["high"], "high": -found["low"]}
            yield spread(turned)
        yield " ".join(pair(study, "direction: opd-forward - opd-exact"))
    yield " ".join(pair(more, "direction: opd-forward, 200 steps - opd-exact, 200 steps"))
    yield " ".join(pair(more, "direction: opd-forward - opd-exact"))
    yield " ".join(pair(tiny, "P3: opd-exact-reward - opd-exact"))
    gold = long["arms"]["sft-gold"]["runs"][0]
    assert (gold["settings"]["lr"], round(gold["cost"]["rollouts"], -3)) == (4e-3, 85_000)
    yield f"tiny models, {score(long, 'merge-average')} on SmolLM2"
    yield f"best merge: {score(tiny, 'merge-average')}"
    for arm, form in (
        ("exact-gold", "{} times fewer on tiny models, {} on SmolLM2"),
        ("sft-teacher-gold", "{} and {}"),
    ):
        factors = {
            name: [
                level["arms"][arm]["tokens_factor"]["value"] for level in result(f"headline-{name}")["levels"].values()
            ]
            for name in ("tiny", "smol")
        }
        yield form.format(*(f"{min(one):.1f} to {max(one):.1f}" for one in factors.values()))
    spent = [
        level["arms"]["exact-gold"]["factor"]["value"]
        for name in ("tiny", "smol")
        for level in result(f"headline-{name}")["levels"].values()
    ]
    yield f"FLOPs {min(spent):.1f} to {max(spent):.1f} times"
    recovery = result("recovery")["table"]
    yield f"OPD {spread(recovery['sft, recovery by opd']['after_of_peak'], 2)} of the peak, RL {spread(recovery['sft, recovery by rl']['after_of_peak'], 2)}"
    teachers = result("added-teachers")["teachers"].values()
    yield ", ".join(f"{entry['mean']['value']:.3f}" for entry in teachers)
    grid = result("agents")["worlds"]["grid"]
    yield f"{of_arm(grid, 'all turns', 'kl'):.2f} on the student's own turns, {of_arm(grid, 'all turns', 'kl_oracle'):.2f} after the oracle's"
    every, first, forward = (of_arm(grid, arm, "solved") for arm in ("all turns", "first turn", "forward"))
    start = grid["start"]["summary"]["solved"]
    yield f"solves {every:.2f} of the grid's episodes, the start {start:.2f}, OPD on the first turn {first:.2f}, and {forward:.2f} with turns"
    longer = result("agents-long")["worlds"]["grid"]
    every, first, forward = (of_arm(longer, arm, "solved") for arm in ("all turns", "first turn", "forward"))
    yield f"with three times the tokens {every:.2f}, on the first turn {first:.2f}, bit by bit {forward:.2f}"
    weights = result("beyond-teacher")["outcome_weights"]
    yield f"{weights['3']['mean']:.3f} against {weights['0']['mean']:.3f}"
    studies = result("self-distillation")["studies"]
    privileged, collapse = studies["privileged"], studies["collapse"]
    seeds = ", ".join(f"{one:.3f}" for one in privileged["after"]["by_seed"])
    yield f"{privileged['before']['mean']:.3f} to {privileged['after']['mean']:.3f} ({seeds})"
    yield f"copied at every step: {collapse['before']['mean']:.3f} to {collapse['after']['mean']:.3f}"
    outcomes = {key: found for lab in result("labs-cpu")["labs"].values() for key, found in lab["outcomes"].items()}
    for name in (
        "OPD + reward less OPD",
        "OPD less reward alone",
        "lowest domain, re-anchored less not",
        "second round less first",
        "normalised score of twelve teachers",
    ):
        yield spread(outcomes[name])
    yield f"rank correlation {result('diagnose-ranking')['spearman']:.2f}"


def policy_gradients() -> Iterator[str]:
    words = {
        "OPD, exact": "OPD, exact divergence", "OPD, 1 sample": "OPD, sampled token, 1 sample per prompt",
        "OPD, 8 samples": "OPD, sampled token, 8 samples per prompt", "GRPO": "GRPO, 8 samples per prompt",
        "hard switch": "OPD, sampled token, for 30 steps, then GRPO (hard switch)", "sum": "sum of both advantages, 8 samples per prompt",
    }  # fmt: skip
    for name, entry in result("opd-vs-rl")["methods"].items():
        first, second = (f"{round(mean(entry[f'tokens_to_{level}']), -2):,.0f}" for level in (0.8, 0.9))
        yield f"| {words[name]} | {first} | {second} | "
        yield f" | {100 * entry['final']:.1f} % |"


def side_by_side() -> Iterator[str]:
    found = result("zoo")
    ranked = sorted(found["methods"].items(), key=lambda item: -item[1]["equal_tokens"])
    for name, row in ranked:
        tokens, operations = (f"{row[key]:.3f} ± {row[f'{key}_stderr']:.3f}" for key in ("equal_tokens", "equal_operations"))  # fmt: skip
        yield f"| {name} | {tokens} | {operations} | {row['pass@8']:.2f} | {row['length']:.1f} | {row['forgetting']:+.2f} | {row['seconds']:.0f} |"
    yield f"{found['tokens']:,} response tokens"
    yield f"{sum(row['equal_tokens'] > found['before']['greedy'] for _, row in ranked)} of {len(ranked)} methods end above the start"


PAGES = {
    "docs/evidence/agents.md": drift,
    "README.md": readme, "docs/evidence.md": findings, "docs/evidence/specialists.md": specialists, "docs/evidence/rl.md": rl, "docs/evidence/labs.md": labs,
    "docs/evidence/small-studies.md": small_studies, "docs/evidence/side-by-side.md": side_by_side, "docs/performance.md": performance, "docs/divergences.md": divergence_table,
    "docs/async.md": asynchronous, "docs/agents.md": agents, "docs/policy-gradients.md": policy_gradients,
}  # fmt: skip


def missing() -> list[str]:
    return [
        f"{page}: {line}"
        for page, lines in PAGES.items()
        for line in lines()
        if line not in (ROOT / page).read_text(encoding="utf-8")
    ]


def main() -> None:
    if "--check" in sys.argv:
        sys.exit("\n".join(missing()) or 0)
    for page, lines in PAGES.items():
        print(page, *lines(), "", sep="\n")


if __name__ == "__main__":
    main()
