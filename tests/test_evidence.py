"""Questions, marks and scores of the capability-integration benchmark: what every number of docs/evidence.md rests on."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opd.rewards.texts import Exact
from opd.types import Prompt, Sample

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("integration", "runs", "headline", "labs")]:
        del sys.modules[name]


def test_no_question_is_in_two_splits_and_none_is_guessed() -> None:
    from integration.domains import EDITIONS, SPLITS

    for edition in EDITIONS.values():
        for domain in edition.values():
            rows = {split: domain.rows(split, 40) for split in SPLITS}
            asked = [row["prompt"][0]["content"] for part in rows.values() for row in part]
            assert len(set(asked)) == len(asked)
            answers = Counter(row["answer"] for row in domain.rows("report", 200))
            assert answers.most_common(1)[0][1] <= 16, domain.name


def test_worked_answers_end_with_the_reference() -> None:
    from integration.domains import SMOL, right

    assert sum(domain.worked for domain in SMOL.values()) * 2 == len(SMOL)
    for domain in SMOL.values():
        for row in domain.rows("train", 20):
            assert right(row["completion"], row["answer"])
            assert domain.worked == (row["completion"] != row["answer"])


@pytest.mark.parametrize("text", ["7, 8", "steps\n7,8", " 7 , 8 \n\n", "7, 8\nso", "", "7, 9", "7, 8 done"])
def test_the_mark_is_the_reward(text: str) -> None:
    from integration.domains import right
    from integration.editions import REWARD

    settings: dict[str, Any] = {key: value for key, value in REWARD.items() if key != "kind"}
    sample = Sample(Prompt(id="p", domain="d", text="?", fields={"answer": "7, 8"}), text)
    assert Exact(**settings).reward(sample).reward == float(right(text, "7, 8"))


def test_a_domain_is_worth_what_it_gained() -> None:
    from integration.scores import flops, interval, pooled

    start, specialists = {"a": "0000" * 20, "b": "1000" * 20}, {"a": "1111" * 20, "b": "1110" * 20}
    assert pooled(specialists, start, specialists) == 1.0
    assert pooled(start, start, specialists) == 0.0
    assert pooled({"a": "1100" * 20, "b": "1000" * 20}, start, specialists) == pytest.approx(0.5 / 1.5)
    found = interval([specialists, start], start, specialists)
    assert found["value"] == pytest.approx(0.5)
    assert found["low"] <= 0.5 <= found["high"]
    same = interval([specialists], start, specialists, against=[specialists])
    assert same["value"] == same["low"] == same["high"] == 0.0
    cost = {"prefill": 10, "sampled": 5, "scored": 15, "trained": 15}
    assert flops(cost, 100, 200) == 2 * 100 * 15 + 2 * 200 * 15 + 6 * 100 * 15


def test_a_level_that_is_missed_is_censored() -> None:
    from headline import cost_to, factor, told

    points = [(0.0, 0.2), (10.0, 0.4), (20.0, 0.4), (30.0, 0.8)]
    assert cost_to(points, 0.3) == (pytest.approx(5.0), True)
    assert cost_to(points, 0.6) == (pytest.approx(25.0), True)
    assert cost_to(points, 0.9) == (30.0, False)
    rl = [(100.0, True), (100.0, True)]
    assert factor([(10.0, True), (30.0, False)], rl) is None  # what a missed level costs is not known
    assert told({"factor": None, "censored": 1, "by_seed": [10.0, 30.0]}) == "missed by 1 of 2"
    assert factor([(10.0, True)], rl) == {"value": 10.0, "low": 10.0, "high": 10.0, "at_least": False}
    bound = factor([(10.0, True)], [(100.0, True), (100.0, False)])
    assert bound == {"value": 10.0, "low": 10.0, "high": None, "at_least": True}
    assert told({"factor": bound}) == "RL costs at least 10.0x [10.0, ]"


def test_outcomes_of_labs_come_from_what_was_measured() -> None:
    from labs import PREDICTIONS, outcome

    def stage(name: str, **scores: tuple[float, float]) -> dict[str, Any]:
        found = {
            domain: {"details": {"before": {"n": 200, "greedy": before}, "after": {"n": 200, "greedy": after}}}
            for domain, (before, after) in scores.items()
        }
        return {"name": name, "evals": found}

    stages = [
        stage("sft", ciphers=(0.5, 0.8)), stage("reasoning-rl", arithmetic=(0.5, 0.9)), stage("agentic-rl", spelling=(0.5, 1.0)),
        stage("general-rl", sorting=(0.5, 0.8)),
        stage("recovery", arithmetic=(0.6, 0.9), spelling=(0.7, 0.9), ciphers=(0.4, 0.8), sorting=(0.8, 0.76)),
    ]  # fmt: skip
    run = {"": {one["name"]: one for one in stages}}
    found = {name: outcome(predicted, [run, run]) for name, (predicted, _) in PREDICTIONS["labs/glm5"].items()}
    worst, last = found.values()
    assert worst["by_seed"] == [pytest.approx(0.9)] * 2  # spelling
    assert last["value"] == pytest.approx(0.95)
    assert last["low"] < 0.95 < last["high"]
