"""Questions, marks and scores of the capability-integration benchmark: what every number of docs/evidence rests on."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from opd.records import Prompt, Sample
from opd.rewards.texts import Exact

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = ("integration", "runs", "headline", "labs", "monitors", "quoted", "step_curves", "step_gpu")


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in SCRIPTS]:
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


def test_a_difference_is_in_its_interval_for_any_seeds() -> None:
    """One seed against two that differ: the interval knows of both, and its middle is the difference."""
    from integration.scores import interval

    start, specialists = {"a": "0" * 60}, {"a": "1" * 60}
    better, worse, between = {"a": "1" * 60}, {"a": "0" * 60}, {"a": "10" * 30}
    found = interval([between], start, specialists, against=[worse, better])
    assert found["value"] == 0
    assert found["low"] < -0.3
    assert found["high"] > 0.3
    paired = interval([worse, better], start, specialists, against=[worse, better])
    assert (paired["value"], paired["low"], paired["high"]) == (0, 0, 0)


def test_another_framework_enters_with_its_answers(tmp_path: Path) -> None:
    from integration.editions import tiny
    from integration.report import enter, summarise

    edition = tiny(tmp_path)
    edition.domains, edition.prompts, edition.counts = ["sorting"], 4, dict.fromkeys(edition.counts, 4)
    edition.write_data()
    rows = [json.loads(line) for line in (tmp_path / "data/sorting-report.jsonl").read_text().splitlines()]
    cost = {"prefill": 10, "sampled": 20, "scored": 30, "trained": 30, "rollouts": 5}
    answers = {"sorting": [row["answer"] for row in rows[:3]] + ["?"]}
    run = {"arm": "theirs-opd", "seed": 0, "split": "report", "settings": {"lr": 1, "steps": 7}, "seconds": 1.0}
    run |= {"cost": cost, "answers": answers}
    given = tmp_path / "theirs.json"
    given.write_text(json.dumps(run))
    entry = json.loads(enter(edition, given).read_text())
    assert entry["marks"] == {"sorting": "1110"}
    found = summarise(edition, {"sorting": "0000"}, {"sorting": "1111"})["arms"]["theirs-opd"]
    assert found["score"]["value"] == 0.75
    assert found["flops"]["marginal"] == 455_936 * (2 * 30 + 2 * 30 + 6 * 30)
    schema = json.loads((BENCHMARKS / "integration/entry.schema.json").read_text())
    jsonschema = pytest.importorskip("jsonschema")
    for one in (entry, run):
        jsonschema.validate(one, schema)
    given.write_text(json.dumps(run | {"answers": {"sorting": ["1"]}}))
    with pytest.raises(SystemExit, match=r"1 answers of sorting, and .* has 4 questions"):
        enter(edition, given)


def test_where_rl_gains_nothing_there_is_no_level() -> None:
    from argparse import Namespace

    from headline import summarise
    from integration.editions import tiny

    cost = {"prefill": 1, "sampled": 1, "scored": 0, "trained": 2}
    run = {"cost": cost, "curve": [{"tokens": 4, "scores": {"a": 1.0}}], "evals": {"main": {"a": {"before": 1.0}}}}
    found = summarise(tiny(Path()), {"grpo": [run], "exact-gold": [run]}, {"gold": 1.0}, Namespace(domain="a"))
    assert (found["rl_gain"], found["levels"]) == (0.0, {})


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
    assert told({"factor": bound, "tokens_factor": factor([(10.0, True)], rl)}) == (
        "RL costs at least 10.0x [10.0, ] the FLOPs, 10.0x [10.0, 10.0] the tokens of answers"
    )


def test_outcomes_of_labs_come_from_what_was_measured() -> None:
    from labs import PREDICTIONS, outcome

    def stage(name: str, **scores: tuple[float, float]) -> dict[str, Any]:
        found = {
            domain: {"before": {"n": 200, "greedy": before}, "after": {"n": 200, "greedy": after}}
            for domain, (before, after) in scores.items()
        }
        return {"name": name, "scores": found}

    stages = [
        stage("sft", ciphers=(0.5, 0.8)), stage("reasoning-rl", arithmetic=(0.5, 0.9)), stage("agentic-rl", spelling=(0.5, 1.0)),
        stage("general-rl", sorting=(0.5, 0.8)),
        stage("recovery", arithmetic=(0.6, 0.9), spelling=(0.7, 0.9), ciphers=(0.4, 0.8), sorting=(0.8, 0.76)),
    ]  # fmt: skip
    run = {"": {one["name"]: one["scores"] for one in stages}}
    found = {name: outcome(predicted, [run, run]) for name, (predicted, _) in PREDICTIONS["labs/glm5"].items()}
    worst, last = found.values()
    assert worst["by_seed"] == [pytest.approx(0.9)] * 2  # spelling
    assert last["value"] == pytest.approx(0.95)
    assert last["low"] < 0.95 < last["high"]


@pytest.mark.parametrize("script", ["labs", "monitors"])
def test_what_was_measured_without_changes_is_not_written_over(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(script)
    monkeypatch.setattr(sys, "argv", [script, "--set", "train.steps=1"])
    monkeypatch.setattr(module, "save", lambda *_: pytest.fail("written over"))
    monkeypatch.setattr(module, "carry_out", lambda *_: pytest.fail("carried out"))
    with pytest.raises(SystemExit, match="measured without --set"):
        module.main()


@pytest.mark.slow
def test_a_job_is_done_with_all_that_it_makes(tmp_path: Path) -> None:
    from integration.editions import tiny
    from integration.jobs import run_all

    edition = tiny(tmp_path)
    edition.domains, edition.prompts, edition.counts = ["sorting"], 4, dict.fromkeys(edition.counts, 4)
    edition.write_data()
    other = edition.job("other", 0, "tune", model=edition.start)
    answers = Path(edition.answers(edition.specialist("sorting")))
    job = edition.job("one", 0, "report", model=edition.specialist("sorting"), references=[other], answers=str(answers))
    made = [Path(job["entry"]), Path(other["entry"]), answers]
    run_all([job], tmp_path, 0)
    answers.unlink()  # as if a worker had been ended before it came to them, or on the way to another machine
    run_all([job], tmp_path, 0)
    assert all(path.is_file() for path in made)
    assert max(made, key=lambda path: path.stat().st_mtime_ns) == made[0]  # its own entry is the last


@pytest.mark.slow
def test_a_worker_that_dies_takes_one_job_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One job is killed, one takes longer than it may; the study says so, does the others and then says what is missing."""
    import os
    import time
    from signal import SIGKILL
    from threading import Thread

    from integration import jobs
    from integration.editions import tiny

    edition = tiny(tmp_path)
    edition.domains, edition.prompts, edition.counts = ["sorting"], 4, dict.fromkeys(edition.counts, 4)
    edition.write_data()
    waits = tmp_path / "waits"
    waits.mkdir()
    os.mkfifo(waits / "sorting-report.jsonl")  # nobody ever writes to it
    late, killed, whole = (edition.job(name, 0, "report", model=edition.start) for name in ("late", "killed", "whole"))
    late |= {"data": str(waits), "limit": 0.5}
    killed |= {"data": str(waits)}

    def kill() -> None:
        while not (tmp_path / "jobs" / "killed-seed0.log").is_file():
            time.sleep(0.05)
        process = jobs._workers(1)[0]._process
        assert process.pid is not None
        os.kill(process.pid, SIGKILL)

    Thread(target=kill, daemon=True).start()
    with pytest.raises(SystemExit, match="2 of 3 runs have no entry: late-seed0, killed-seed0"):
        jobs.run_all([late, killed, whole], tmp_path, 1)
    told = capsys.readouterr().out
    assert "late-seed0: no entry; it took longer than its limit" in told
    assert "killed-seed0: no entry; its process was ended by SIGKILL" in told
    assert list(jobs.run_all([whole], tmp_path, 1)) == ["whole-seed0"]


def test_quoted_numbers_are_those_of_the_results() -> None:
    from quoted import missing

    assert not missing()


@pytest.mark.parametrize("study", ["tiny", "smol", "smol-rest", "smol-long", "smol-more", "smol-strong"])
def test_stored_scores_are_those_of_the_marks(study: str) -> None:
    from integration.scores import pooled
    from quoted import result

    found = result(f"integration-{study}")
    for entry in found["arms"].values():
        runs = sorted(entry["runs"], key=lambda run: run["seed"])
        scores = [pooled(run["marks"], found["start"], found["specialists"]) for run in runs]
        assert entry["score"]["by_seed"] == pytest.approx(scores)
        assert entry["score"]["value"] == pytest.approx(sum(scores) / len(scores))


def test_the_first_figure_has_the_measured_steps() -> None:
    from step_curves import step_phases

    drawn = (BENCHMARKS.parent / "docs/figures/step.svg").read_text(encoding="utf-8")
    for name, seconds in step_phases().items():
        assert f"<!-- {name} -->" in drawn
        assert f"<!-- {sum(seconds.values()):.1f} s -->" in drawn
