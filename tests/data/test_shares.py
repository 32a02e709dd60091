"""Shares of prompts per domain: what each rule makes of what was seen, what the stream makes of shares, and a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opd
from opd.common.errors import DataError, RecipeError
from opd.data.sources import open_sources, prompt_source
from opd.data.stream import (
    AHEAD,
    DomainRecord,
    DomainSeen,
    GapShares,
    LengthShares,
    PromptStream,
    ShareKeeper,
    TokenShares,
)
from opd.recipe import load_recipe
from tests.support.helpers import save_tiny

STATIC = {"a": 0.5, "b": 0.5}


def test_tokens_pays_back_what_a_domain_is_owed() -> None:
    records = {"a": DomainRecord(length=10, tokens=900, recent=90), "b": DomainRecord(length=2, tokens=100, recent=10)}
    goal = 1000 + AHEAD * 100
    wanted = {"a": (0.5 * goal - 900) / 10 / 0.5, "b": (0.5 * goal - 100) / 2 / 0.5}
    assert TokenShares().factors(records, STATIC) == pytest.approx(wanted)
    records["a"].tokens = 5000  # owed nothing for a long time
    assert TokenShares().factors(records, STATIC)["a"] == 0


def test_length_and_gap_go_by_powers() -> None:
    records = {"a": DomainRecord(length=16, kl=0.4, gap=-0.1), "b": DomainRecord(length=4, kl=0.1, gap=0.2)}
    assert LengthShares().factors(records, STATIC) == {"a": 1 / 16, "b": 1 / 4}
    assert LengthShares(power=0.5).factors(records, STATIC) == {"a": 4, "b": 2}
    assert GapShares(power=2).factors(records, STATIC) == pytest.approx({"a": 0.16, "b": 0.01})
    assert GapShares(of="score").factors(records, STATIC) == {"a": 0, "b": 0.2}


def test_a_keeper_smooths_leaves_everybody_something_and_starts_with_the_recipe() -> None:
    keeper = ShareKeeper(GapShares(smoothing=0.5, least=0.2), {"a": 3, "b": 1, "c": 1})
    static = {"a": 0.6, "b": 0.2, "c": 0.2}
    assert keeper.shares({}) == pytest.approx(static)
    keeper.observe({"a": DomainSeen(2, 8, 0.0), "b": DomainSeen(1, 1, 1.0)})
    keeper.observe({"a": DomainSeen(2, 8, 0.4), "b": DomainSeen(1, 1, None)})
    need = {"a": 0.2, "b": 1.0, "c": (0.6 * 0.2 + 0.2 * 1.0) / 0.8}  # nothing is known of c: the mean
    raw = {name: static[name] * need[name] for name in static}
    wanted = {name: 0.2 * static[name] + 0.8 * raw[name] / sum(raw.values()) for name in static}
    assert keeper.shares({}) == pytest.approx(wanted)
    again = ShareKeeper(GapShares(smoothing=0.5, least=0.2), {"a": 3, "b": 1, "c": 1})
    again.restore(keeper.state())
    assert again.shares({}) == keeper.shares({})


def stream(**rule: Any) -> PromptStream:
    specs = [prompt_source("task:addition", domain="a"), prompt_source("task:reverse", domain="a", share=3),
             prompt_source("task:sort", domain="b", share=4)]  # fmt: skip
    found = PromptStream(open_sources(specs, bad_rows="stop", rewarded=False), [1, 3, 4], 0)
    found.steer(
        load_recipe({"student": "x", "prompts": ["task:addition", "task:sort"], "shares": rule}).stages[0].shares
    )
    return found


def test_new_shares_hold_from_now_on_and_sources_of_a_domain_keep_their_parts() -> None:
    steered = stream(kind="length")
    counts = np.zeros(3)
    for shares, draws in (({"a": 0.5, "b": 0.5}, 80), ({"a": 0.9, "b": 0.1}, 40), ({"a": 0.1, "b": 0.9}, 160)):
        steered.reshare(shares)
        before = counts.copy()
        for visit in steered.take(draws):
            counts[visit.source] += 1
        wanted = np.array([shares["a"] / 4, shares["a"] * 3 / 4, shares["b"]]) * draws
        assert np.abs(counts - before - wanted).max() <= 2
        assert steered.shares == pytest.approx(shares)
    again = stream(kind="length")
    again.restore(steered.state())
    assert [visit.prompt.id for visit in again.take(9)] == [visit.prompt.id for visit in steered.take(9)]


def test_a_fixed_stream_draws_as_it_always_has() -> None:
    fixed, steered = stream(), stream(kind="length")
    assert fixed.keeper is None
    assert fixed.state() == {"taken": [0, 0, 0], "skipped": 0}
    assert [visit.source for visit in fixed.take(16)] == [2, 1, 2, 0, 1, 2, 1, 2] * 2
    steered.reshare({"a": 0.5, "b": 0.5})
    assert [visit.source for visit in steered.take(16)] == [2, 1, 2, 0, 1, 2, 1, 2] * 2


def recipe(models: list[str], **more: Any) -> dict[str, Any]:
    return {
        "student": models[0], "teachers": {"a": models[1], "b": models[2]}, "device": "cpu",
        "prompts": [{"source": "task:addition", "domain": "a"}, {"source": "task:reverse", "domain": "b"}],
        "rollout": {"prompts": 8, "max_new_tokens": 4}, "train": {"steps": 4, "lr": 1e-2}, "checkpoint": {"every": 1},
        "eval": {"prompts": 4, "every": 2}, "sampler": {"slots": 4}, "log": {"start_table": False}, **more,
    }  # fmt: skip


@pytest.mark.slow
def test_a_resumed_run_divides_prompts_like_an_uninterrupted_one(tmp_path: Path) -> None:
    models = [save_tiny(tmp_path / str(seed), seed=seed) for seed in range(3)]
    changes = recipe(models, shares={"kind": "gap", "least": 0}, eval={"prompts": 0}, checkpoint={"every": 2})
    whole = opd.run(changes, out=tmp_path / "whole")
    cut = opd.run(changes, out=tmp_path / "cut", on_step=lambda run, line: run.stop() if run.step == 3 else None)
    assert len(cut.metrics) < 4
    resumed = opd.resume(tmp_path / "cut")
    keys = ("step", "loss", "share/a", "share/b", "tokens")
    assert [[line[key] for key in keys] for line in resumed.metrics] == [
        [line[key] for key in keys] for line in whole.metrics
    ]
    lines = [(line["share/a"], line["share/b"]) for line in whole.metrics]
    assert lines[0] == (0.5, 0.5)
    first = whole.metrics[0]
    assert lines[1][0] == pytest.approx(first["kl/a"] / (first["kl/a"] + first["kl/b"]))
    assert all(sum(line) == pytest.approx(1) for line in lines)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"shares": "tokens", "prompts": "task:addition"}, "there is one source"),
        ({"shares": "gap", "teachers": None}, "there is none"),
        ({"shares": {"kind": "gap", "of": "score"}, "eval": {"every": 0}}, "set eval.every"),
        ({"shares": {"kind": "static", "least": 0.5}}, "least belongs to shares"),
        ({"shares": "token"}, "did you mean 'tokens'"),
        ({"shares": "gap", "rollout": {"staleness": 1}}, "before they are known"),
    ],
)
def test_shares_that_cannot_be_followed_are_rejected(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(RecipeError, match=what):
        load_recipe(recipe(["x", "y", "z"]) | changes)


def test_a_source_of_several_domains_is_rejected_if_shares_change(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "domain": "a"}\n{"prompt": "2", "domain": "b"}\n' * 3)
    specs = [prompt_source(str(tmp_path / "rows.jsonl")), prompt_source("task:sort")]
    mixed = PromptStream(open_sources(specs, bad_rows="stop", rewarded=False), [1, 1], 0)
    with pytest.raises(DataError, match=r"rows of the domains a, b, and shares tokens"):
        mixed.steer(TokenShares())
    specs = [prompt_source("task:addition", domain="a"), prompt_source("task:sort", domain="a")]
    with pytest.raises(DataError, match="there is one: a"):
        PromptStream(open_sources(specs, bad_rows="stop", rewarded=False), [1, 1], 0).steer(TokenShares())
