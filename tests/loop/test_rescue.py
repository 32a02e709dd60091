"""Rollouts that are sampled under a view and trained on under the plain prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

import opd
from opd.common.errors import RecipeError
from opd.data.prompts import render_prompt
from opd.data.tasks import get_task
from opd.models.load import load_tokenizer
from opd.recipe import load_recipe
from opd.records import TokenColumns
from opd.rollouts.rollouter import as_trained, sampled_under
from opd.rollouts.writers import AUTHORS
from opd.store import RolloutStore
from tests.support.helpers import save_tiny

TOLD: dict[str, Any] = {"kind": "template", "template": "{prompt}={answer} {prompt}"}
PROXIMAL = {"kind": "importance_sampling", "against": "proximal"}
OUTCOME: dict[str, Any] = {
    "form": "policy_gradient",
    "advantage": {"teacher_weight": 0, "outcome_weight": 1},
    "surrogate": PROXIMAL,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tiny(root / name, seed=seed) for seed, name in enumerate(("student", "teacher"))}


def recipe(models: dict[str, str], **changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "student": models["student"],
        "prompts": [{"source": "task:addition", "domain": "a"}],
        "rollout": {"prompts": 4, "samples": 2, "max_new_tokens": 5},
        "sampler": {"slots": 4},
        "objective": OUTCOME,
        "train": {"steps": 2, "lr": 1e-3},
        "eval": {"prompts": 0},
        "device": "cpu",
    }
    return base | changes


def told(index: int, tokenizer: Any) -> list[int]:
    prompt = get_task("addition").prompt("train", index)
    assert prompt.messages is not None
    asked = prompt.messages[0]["content"]
    from opd.teachers.views import asking

    return render_prompt(asking(prompt, f"{asked}={prompt.fields['answer']} {asked}"), tokenizer).tolist()  # type: ignore[no-any-return]


def test_a_share_is_sampled_under_a_view_and_trained_on_under_the_prompt(
    models: dict[str, str], tmp_path: Path
) -> None:
    """The store keeps what was read; log-probs under that prompt are facts there, and unknown to the loss."""
    rollout = {"prompts": 8, "max_new_tokens": 5, "writers": [{"kind": "shown", "share": 0.5, "view": TOLD}]}
    spec = recipe(models, rollout=rollout, teachers={"a": models["teacher"]}, objective={"form": "direct"})
    run = opd.run(spec, out=tmp_path / "run")
    tokenizer = load_tokenizer(models["student"])
    sources = {"student": 0, "shown:template": 0}
    for rollout_id, entry in run.rollouts.entries.items():
        (item,) = run.rollouts.load([rollout_id])
        index = int(item.prompt_id.rsplit("/", 1)[1])
        plain = render_prompt(get_task("addition").prompt("train", index), tokenizer)
        sources[entry.source] += 1
        assert item.prompt_ids.tolist() == plain.tolist()
        assert np.isfinite(item.logprob).all()
        if entry.source == "student":
            assert item.extras == {}
            assert as_trained(item) is item
        else:
            assert sampled_under(item).tolist() == told(index, tokenizer) != plain.tolist()
            assert np.isnan(as_trained(item).logprob).all()
    assert min(sources.values()) >= 3
    assert run.metrics[0]["rollout/unshown"] == 0
    assert run.metrics[0]["mismatch"] < 1e-4  # of the others alone


def test_a_teacher_with_a_shorter_context_answers_what_it_can_read(models: dict[str, str], tmp_path: Path) -> None:
    """What the student is shown is longer than the teacher's context; the teacher is asked plainly."""
    short = save_tiny(tmp_path / "short", seed=2, max_position_embeddings=32)
    writer = {
        "kind": "shown",
        "share": 0.5,
        "view": {"kind": "template", "template": "{prompt}" + "." * 40 + "{prompt}"},
    }
    spec = recipe(
        models, rollout={"prompts": 4, "max_new_tokens": 5, "writers": [writer]}, teachers={"a": short}, train={"steps": 1},
        eval={"prompts": 2, "max_new_tokens": 4}, objective={"form": "direct"},
    )  # fmt: skip
    run = opd.run(spec, out=tmp_path / "run")
    assert run.metrics[0]["rollout/unshown"] == 0
    assert run.summary["stages"][0]["teachers"]["a"]


def test_views_of_one_kind_keep_their_authors_apart(models: dict[str, str], tmp_path: Path) -> None:
    other = {"kind": "template", "template": "{answer} {prompt}"}
    writers = [
        {"kind": "shown", "share": 0.5, "view": TOLD},
        {"kind": "shown", "share": 0.5, "view": other, "trained_as": "teacher"},
    ]
    spec = recipe(
        models, rollout={"prompts": 8, "max_new_tokens": 3, "writers": writers}, train={"steps": 1},
        teachers={"a": models["teacher"]}, objective={"form": "direct", "on": ["student", "teacher"]},
    )  # fmt: skip
    run = opd.run(spec, out=tmp_path / "run")
    tokenizer, seen = load_tokenizer(models["student"]), set()
    for item in run.rollouts.load(list(run.rollouts.entries)):
        index = int(item.prompt_id.rsplit("/", 1)[1])
        author = "student" if sampled_under(item).tolist() == told(index, tokenizer) else "teacher"
        assert set(item.author.tolist()) == {AUTHORS[author]}
        seen.add(author)
    assert seen == {"student", "teacher"}


def test_nothing_to_show_is_answered_plainly_and_counted(models: dict[str, str], tmp_path: Path) -> None:
    rows = [{"prompt": f"add {n}+2", "answer": str(n + 2), **({"why": "so"} if n % 2 else {})} for n in range(8)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = {
        "kind": "shown",
        "share": 1.0,
        "view": {"kind": "template", "template": "{why} {prompt}"},
        "trained_as": "teacher",
    }
    spec = recipe(
        models, prompts={"source": str(file), "domain": "a", "eval_source": str(file)}, train={"steps": 1},
        rollout={"prompts": 8, "max_new_tokens": 3, "writers": [shown]}, objective={"form": "cross_entropy"},
    )  # fmt: skip
    run = opd.run(spec, out=tmp_path / "run")
    assert run.metrics[0]["rollout/unshown"] == 0.5
    assert [entry.source for entry in run.rollouts.entries.values()].count("student") == 4


def copier(models: dict[str, str], tmp_path: Path, **rescue: Any) -> dict[str, Any]:
    """An answer is right if it has a letter that random answers have now and then."""
    rewards = {"kind": "format", "pattern": "[a-d]"}
    rollout = {"prompts": 4, "samples": 4, "max_new_tokens": 3, "rescue": {"view": TOLD, "attempts": 4, **rescue}}
    return recipe(models, rollout=rollout, rewards=rewards, train={"steps": 2, "lr": 1e-3})


@pytest.mark.parametrize("trained_as", ["student", "teacher"])
def test_failed_prompts_are_answered_again_and_right_answers_take_their_places(
    models: dict[str, str], tmp_path: Path, trained_as: str
) -> None:
    terms = [OUTCOME, {"form": "cross_entropy", "on": ["teacher"]}] if trained_as == "teacher" else OUTCOME
    spec = {**copier(models, tmp_path, trained_as=trained_as, replace=2), "objective": terms}
    seen: list[Any] = []
    run = opd.run(
        spec, out=tmp_path / "run", on_rollouts=lambda live, rollouts: seen.append((list(rollouts), dict(live.rewards)))
    )
    store = run.rollouts
    rescued = 0
    for (rollouts, rewards), line in zip(seen, run.metrics, strict=True):
        groups: dict[str, list[Any]] = {}
        for item in rollouts:
            groups.setdefault(item.group, []).append(item)
        assert all(len(members) == 4 for members in groups.values())
        for members in groups.values():
            again = [item for item in members if "sampled_under" in item.extras]
            plain = [store.entries[f"main/{members[0].group}/{sample}"].notes["reward"] for sample in range(4)]
            assert len(again) <= 2
            if again:
                rescued += 1
                assert max(plain) == 0  # all had failed
                assert all(rewards[item.id] == 1 for item in again)
                assert all(np.isnan(item.logprob).all() for item in again)
                assert {int(code) for item in again for code in item.author} == {0 if trained_as == "student" else 1}
        assert 0 < line["rescue/failed"] <= 1
    assert rescued > 1
    attempts = [entry for entry in store.entries.values() if entry.source == "rescue:template"]
    assert all(entry.sample >= 4 for entry in attempts)
    assert all("reward" in entry.notes for entry in attempts)


def test_a_hint_is_written_once_and_found_again(models: dict[str, str], tmp_path: Path) -> None:
    """Sampled from the teacher, shown to the student, kept in the store, never trained on."""
    hint = {"by": "teacher", "template": "{prompt} is {answer}:", "max_new_tokens": 4}
    spec = copier(models, tmp_path, hint=hint, view={"kind": "template", "template": "{prompt} ({hint})"})
    spec |= {"teachers": {"a": models["teacher"]}, "objective": [OUTCOME, {"form": "direct"}]}
    run = opd.run(spec, out=tmp_path / "run")
    tokenizer, store = load_tokenizer(models["student"]), run.rollouts
    hints = [entry for entry in store.entries.values() if entry.source == "hint:teacher"]
    assert hints
    for entry in hints:
        (text,) = store.load([entry.id])
        said = tokenizer.decode(text.response_ids.tolist(), skip_special_tokens=True).strip()
        asked = [
            other
            for other in store.entries.values()
            if other.source.startswith("rescue") and other.id.startswith(entry.group.removesuffix("hint"), 5)
        ]
        for other in asked:
            (answer,) = store.load([other.id])
            assert f"({said})" in tokenizer.decode(sampled_under(answer).tolist())
        assert bool(asked) == bool(said)
    trained = sum(line["tokens"] for line in run.metrics)
    assert trained < sum(entry.length for entry in store.entries.values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective": {**OUTCOME, "surrogate": "ppo"}}, "sampled under another prompt"),
        ({"objective": {**OUTCOME, "correction": {"kind": "tis"}, "advantage": OUTCOME["advantage"]}}, "sampled under another prompt"),
        ({"objective": {"form": "direct", "correction": {"kind": "prefix"}}}, "sampled under another prompt"),
        ({"objective": {"form": "policy_gradient", "surrogate": PROXIMAL}}, "sampled under another prompt"),
        ({"objective": {"form": "direct", "gate": {"kind": "perplexity"}}}, "sampled under another prompt"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", ["rescue", "writers"])
def test_comparisons_with_the_sampler_are_rejected(changes: dict[str, Any], words: str, key: str) -> None:
    value: Any = {"view": TOLD} if key == "rescue" else [{"kind": "shown", "share": 0.5, "view": TOLD}]
    base = {
        "student": "tiny/generalist",
        "teachers": {"a": "tiny/arithmetic"},
        "prompts": {"source": "task:addition", "domain": "a"},
        "rollout": {"samples": 2, key: value},
    }
    with pytest.raises(RecipeError, match=words):
        load_recipe({**base, **changes})
    load_recipe({**base, "objective": OUTCOME})
    load_recipe(
        {**base, "objective": {"form": "policy_gradient", "surrogate": PROXIMAL, "advantage": {"student": "proximal"}}}
    )


@pytest.mark.parametrize(
    ("rescue", "words"),
    [
        ({"view": "revision"}, "not show a prompt that can be answered"), ({"view": "same"}, "what the failed samples have read"),
        ({"view": {**TOLD, "skip": 2}}, "skip is for tokens that a teacher scores"),
        ({"view": {**TOLD, "chat_template": "teacher"}}, "with its own chat template"),
        ({"view": TOLD, "replace": 9}, "replace 9 of rollout.samples 2"),
        ({"view": TOLD, "hint": {"template": "{prompt}"}}, "the view does not show it"),
        ({"view": {"kind": "template", "template": "{hint}"}, "hint": {"template": "{hint}"}}, "cannot name"),
        ({"view": {"kind": "template", "template": "{hint} {prompt}"}, "hint": {"template": "{prompt}"}}, "no teacher to write it"),
    ],
)  # fmt: skip
def test_rescues_without_a_meaning_are_rejected(rescue: dict[str, Any], words: str) -> None:
    base = {"student": "tiny/generalist", "prompts": "task:addition", "objective": OUTCOME}
    with pytest.raises((RecipeError, ValidationError), match=words):
        load_recipe({**base, "rollout": {"samples": 2, "rescue": rescue}})
    with pytest.raises(RecipeError, match="there are none yet"):
        load_recipe(
            {**base, "rollout": {"samples": 2, "writers": [{"kind": "shown", "share": 0.5, "view": "sibling"}]}}
        )
    with pytest.raises(RecipeError, match="not show a prompt that can be answered"):
        load_recipe({**base, "rollout": {"writers": [{"kind": "shown", "share": 0.5, "view": "bytes"}]}})


def test_experience_is_written_from_the_answers_and_shown_to_the_teacher(
    models: dict[str, str], tmp_path: Path
) -> None:
    experience = {"by": "student", "template": "{trajectories}!", "trajectories": 2, "max_new_tokens": 6}
    spec = recipe(
        models, rollout={"prompts": 3, "max_new_tokens": 4, "experience": experience}, objective={"form": "policy_gradient"},
        teachers={"a": {"kind": "self", "view": {"kind": "template", "template": "{experience}/{prompt}"}}},
    )  # fmt: skip
    run = opd.run(spec, out=tmp_path / "run")
    store, tokenizer = run.rollouts, load_tokenizer(models["student"])
    entries = list(store.entries.values())
    written = [entry for entry in entries if entry.source == "experience:student"]
    assert len(written) == 2  # one a step
    for number, entry in enumerate(written):
        (item,) = store.load([entry.id])
        assert tokenizer.decode(item.prompt_ids.tolist()).count("(reward 0)") == 2
        said = tokenizer.decode(item.response_ids.tolist(), skip_special_tokens=True).strip()
        answers = [other for other in entries[4 * number : 4 * number + 4] if other.source == "student"]
        for name, signal in store.signals([other.id for other in answers], "teacher", "logprobs_at").items():
            assert signal.spans[0][2] == store.entries[name].prompt_length + len(said) + 1
        assert run.metrics[number]["experience/tokens"] == entry.length
    with pytest.raises(RecipeError, match="no teacher's view shows it"):
        load_recipe({**spec, "teachers": {"a": models["teacher"]}})
    with pytest.raises(RecipeError, match=r"names \{trajectories\}"):
        load_recipe({**spec, "rollout": {"experience": {"template": "{answer}"}}})


class Interrupted(Exception):
    pass


@pytest.mark.parametrize(
    "after", [pytest.param(9, marks=pytest.mark.slow), pytest.param(52, marks=pytest.mark.slow), 70]
)
def test_an_interrupted_run_resumes_with_the_same_rescues(models: dict[str, str], tmp_path: Path, after: int) -> None:
    """Killed in the middle of a sample, a hint or a rescue: what follows is bit for bit what would have followed."""
    from opd.store import rollouts as stores

    hint = {"by": "student", "template": "{prompt} is {answer}:", "max_new_tokens": 4}
    spec = copier(models, tmp_path, hint=hint, view={"kind": "template", "template": "{prompt} ({hint})"})
    spec |= {"checkpoint": {"every": 1, "resume": "exact"}, "threads": 1}
    whole = opd.run(spec, out=tmp_path / "whole")
    append, count = stores.RolloutStore.append_many, [0]

    def failing(self: RolloutStore, tokens: TokenColumns, *author: Any) -> None:
        count[0] += tokens.token.size
        if count[0] > after:
            self.commit(sync=True)
            raise Interrupted
        append(self, tokens, *author)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stores.RolloutStore, "append_many", failing)
        with pytest.raises(Interrupted):
            opd.run(spec, out=tmp_path / "cut")
    resumed = opd.run(spec, out=tmp_path / "cut", resume=True)
    for key in ("loss", "tokens", "rescue/failed", "rescue/tokens"):
        assert [line[key] for line in resumed.metrics] == [line[key] for line in whole.metrics]
    ours, theirs = resumed.rollouts, whole.rollouts
    assert list(ours.entries) == list(theirs.entries)
    for one, other in zip(ours.load(list(ours.entries)), theirs.load(list(theirs.entries)), strict=True):
        assert (one.extras, one.source, one.response_ids.tolist()) == (
            other.extras,
            other.source,
            other.response_ids.tolist(),
        )
