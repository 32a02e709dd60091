"""Answers that two have written: a teacher begins and the student continues, or a teacher continues after a cut."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opd
from opd.common.errors import RecipeError
from opd.recipe import load_recipe
from opd.records import Author, Rollout
from tests.support.chat_endpoint import Served, serving
from tests.support.crash import same_run
from tests.support.interrupted import SCORED, Crash, strike

PATTERN = "[0-4]*"  # of a good beginning


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as found:
        yield found


def recipe(rollout: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "name": "two",
        "student": "tiny/generalist",
        "teachers": {"arithmetic": "tiny/arithmetic"},
        "prompts": [{"source": "task:addition", "domain": "arithmetic"}],
        "rollout": {"prompts": 4, "samples": 2, "max_new_tokens": 6, **rollout},
        "objective": [
            {"form": "policy_gradient"},
            {"form": "cross_entropy", "on": ["teacher"], "coefficient": 0.001},
        ],
        "train": {"steps": 4, "lr": 1e-4},
        "eval": {"prompts": 0},
        "log": {"start_table": False},
        "device": "cpu",
        "threads": 1,
        **changes,
    }


PREFIX = {"teacher_prefix": {"tokens": 2, "to": 0, "over": 3}}
CUT = {"demonstrations": {"cut": "tokens", "below": 0.5, "by": {"kind": "format", "pattern": f"^{PATTERN}$"}}}


def test_a_teacher_begins_and_the_student_continues(tmp_path: Path) -> None:
    run = opd.run(recipe(PREFIX), out=tmp_path / "run")
    prefixes = {rollout.id.removesuffix("/prefix"): rollout for rollout in run.rollouts.where(source="prefix:teacher")}
    answers = list(run.rollouts.where(source="student"))
    assert len(answers) == 4 * 8
    begun = 0
    for step, some in enumerate(np.array_split(np.array(answers, dtype=object), 4)):
        for rollout in some:
            teacher = rollout.author == Author.TEACHER
            if step >= 2:  # 2 tokens, then 1, then none
                assert not teacher.any()
                continue
            prefix = prefixes.pop(rollout.id)
            size = prefix.response_ids.size
            assert size == 2 - step or prefix.stop == "stop"
            assert teacher.tolist() == [True] * size + [False] * (rollout.response_ids.size - size)
            assert rollout.response_ids[:size].tolist() == prefix.response_ids.tolist()
            assert np.isfinite(rollout.logprob).all()
            begun += not teacher.all()
    assert begun
    assert not prefixes
    assert all(line["mismatch"] < 1e-5 for line in run.metrics)  # what the student continued, it continued from there
    assert [line["written/student"] for line in run.metrics] == [1.0] * 4


@pytest.mark.parametrize("rollout", [PREFIX, CUT], ids=["prefix", "cut"])
def test_an_interrupted_run_has_the_same_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollout: dict[str, Any]
) -> None:
    whole = opd.run(recipe(rollout), out=tmp_path / "whole")
    strike(monkeypatch, SCORED, 2, Crash)
    with pytest.raises(Crash):
        opd.run(recipe(rollout), out=tmp_path / "run")
    same_run(opd.resume(tmp_path / "run"), whole)


def pairs(run: opd.Run) -> list[tuple[Rollout, Rollout]]:
    """Failed answers, each with the one that took its place."""
    made = [name for name in run.rollouts.entries if name.endswith("/demonstration")]
    failed = [name.removesuffix("/demonstration") for name in made]
    return list(zip(run.rollouts.load(failed), run.rollouts.load(made), strict=True))


def test_a_teacher_continues_after_the_last_good_step(tmp_path: Path) -> None:
    from opd.models import load_tokenizer

    run = opd.run(recipe(CUT, train={"steps": 2, "lr": 1e-4}), out=tmp_path / "run")
    tokenizer = load_tokenizer("tiny/generalist", None)
    shares = []
    for failed, made in pairs(run):
        ids = failed.response_ids.tolist()
        good = [
            n for n in range(len(ids)) if re.fullmatch(PATTERN, tokenizer.decode(ids[:n], skip_special_tokens=True))
        ]
        kept = next(n for n in range(len(ids)) if n + 1 not in good)
        assert made.response_ids[:kept].tolist() == ids[:kept]
        assert made.logprob[:kept].tolist() == failed.logprob[:kept].tolist()
        wanted = [int(Author.STUDENT)] * kept + [int(Author.TEACHER)] * (made.response_ids.size - kept)
        assert made.author.tolist() == wanted
        assert made.response_ids.size > kept
        assert made.source == "teacher:arithmetic"
        shares.append(kept / len(ids))
    assert 0 < np.mean(shares) < 1
    kept_of = [line["demonstrations/kept"] for line in run.metrics]
    assert min(kept_of) <= np.mean(shares) <= max(kept_of)
    assert len(shares) == sum(line["demonstrations/share"] * 8 for line in run.metrics)


def test_the_student_as_its_own_teacher_draws_demonstrations_anew(tmp_path: Path) -> None:
    """With the key of the failed answer, it would be the same answer."""
    spec = {"demonstrations": {"below": 2, "by": {"kind": "format", "pattern": "x"}}}
    run = opd.run(
        recipe(spec, teachers={"same": {"kind": "self"}}, train={"steps": 1, "lr": 1e-4}), out=tmp_path / "run"
    )
    found = pairs(run)
    assert found
    assert any(made.response_ids.tolist() != failed.response_ids.tolist() for failed, made in found)


def test_an_endpoint_writes_on_after_what_is_kept(served: Served, tmp_path: Path) -> None:
    served.says = "77"
    demonstrations = {
        **CUT["demonstrations"],
        "endpoint": {"address": served.address, "model": "sums"},
        "template": "{prompt} Go on after <{kept}>",
    }
    plan = recipe({"demonstrations": demonstrations}, teachers={}, train={"steps": 1, "lr": 1e-4})
    plan["objective"] = [
        {"form": "policy_gradient", "advantage": {"teacher_weight": 0, "outcome_weight": 1}},
        {"form": "cross_entropy", "on": ["teacher"]},
    ]
    run = opd.run(plan, out=tmp_path / "run")
    found = pairs(run)
    assert any((made.author == Author.STUDENT).any() for _, made in found)
    for failed, made in found:
        kept = int((made.author == Author.STUDENT).sum())
        assert made.response_ids[:kept].tolist() == failed.response_ids[:kept].tolist()
        assert np.isnan(made.logprob[kept:]).all()
        (call,) = run.rollouts.environment(failed.id)
        assert call.call["messages"][0]["content"] in served.asked
        assert re.search(f"<{PATTERN}>$", call.call["messages"][0]["content"])


@pytest.mark.parametrize(
    ("rollout", "changes", "message"),
    [
        (PREFIX, {"teachers": {"start": {"model": "tiny/generalist", "role": "reference"}}}, "there is no teacher to write it"),
        (PREFIX, {"teachers": {}, "objective": {"form": "cross_entropy", "on": ["teacher"]}}, "there is no teacher to write it"),
        ({"teacher_prefix": {"tokens": 6}}, {}, "leaves the student none of rollout.max_new_tokens 6"),
        ({**PREFIX, "staleness": 1}, {}, "would have to sample and score at once"),
        ({**PREFIX, "data_share": 1}, {}, "others write all of them"),
        (PREFIX, {"checkpoint": {"resume": "exact"}}, "Use prefill"),
        (PREFIX, {"teachers": {"arithmetic": {"kind": "openai", "address": "http://x", "model": "y"}}}, "needs a model in this process"),
        ({**PREFIX, "writers": [{"kind": "data", "samples": 1}]},
         {"objective": {"form": "pairwise", "pairs": "authors", "chosen": "teacher", "rejected": "student"}}, "an answer has two"),
        ({"demonstrations": {"below": 0.5}}, {"teachers": {}}, "neither an endpoint nor a teacher"),
        ({"demonstrations": {"cut": "lines"}}, {}, "needs `by`"),
        ({"demonstrations": {"template": "{prompt}!"}}, {}, "are for an endpoint"),
        ({"demonstrations": {"endpoint": {"address": "http://x", "model": "y"}, "template": "{kept}"}}, {}, "nothing is kept"),
        ({"demonstrations": {**CUT["demonstrations"], "endpoint": {"address": "http://x", "model": "y"}}}, {}, "must show"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_rejected(rollout: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(recipe(rollout, **changes))
