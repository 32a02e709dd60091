"""Views, what they mask, and what teachers cannot give."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

import opd
from opd import registry
from opd.common.errors import RecipeError
from opd.data.prompts import question
from opd.loop.step import train_step
from opd.models.attention import Packed
from opd.models.language_model import Pack
from opd.models.load import load_tokenizer
from opd.objective.batch import Batch
from opd.objective.objective import Objective, take_first_pass
from opd.recipe import Rollouts, load_recipe
from opd.records import Prompt, Rendered, Rollout, Signal, SignalNeed, TeacherLike
from opd.registry import Family
from opd.runner.plan import make_plan
from opd.teachers.kinds import FrozenTeacher, ModelRef, TeacherInputs, TeacherKind
from opd.teachers.pool import open_teachers
from opd.teachers.scoring import LocalTeacher
from opd.teachers.views import Group, View, require_aligned, response_after, texts_for
from tests.support.helpers import TEMPLATE, save_tiny, term, tiny_model, tiny_tokenizer
from tests.support.rollouts import rollout
from tests.support.steps import KeepGradients
from tests.support.teachers import spec


def shared(prompt: Prompt, *members: Rollout, **more: Any) -> Group:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return Group(members, tokenizer, **more)


def view(**settings: Any) -> View:
    return Family("view").read(settings)  # type: ignore[return-value]


RECIPE = {"student": "tiny/generalist", "prompts": {"source": "task:addition", "domain": "a"}, "device": "cpu"}
ASKED = Prompt("p", "d", messages=({"role": "user", "content": "one"},), fields={"answer": "two", "hint": ""})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "instruction", "instruction": "brief"}, "brief\n\none="),
        ({"kind": "instruction", "instruction": "brief", "place": "after"}, "one\n\nbrief="),
        ({"kind": "instruction", "instruction": "brief", "place": "system"}, "briefone="),
        ({"kind": "template", "template": "{{{prompt}}} is {answer}"}, "{one} is two="),
    ],
)
def test_a_view_puts_another_prompt_before_the_same_response(settings: dict[str, Any], words: str) -> None:
    member = rollout("p", [5, 6], [8, 9, 1])
    group = shared(ASKED, member)
    text = view(**settings).render(ASKED, member, group)
    assert text is not None
    expected = group.tokenizer(words, add_special_tokens=False)["input_ids"]
    assert text.ids.tolist() == [*expected, 8, 9, 1]
    assert text.spans == ((0, 3, len(expected), len(expected) + 3),)


def test_a_view_without_its_field_shows_nothing() -> None:
    member = rollout("p", [5, 6], [8])
    for template in ("{hint}", "{prompt} {nowhere}"):
        assert view(kind="template", template=template).render(ASKED, member, shared(ASKED, member)) is None
    plain = replace(ASKED, messages=None, text="one")
    assert question(view(kind="template", template="{prompt}{answer}").rewrite(plain) or ASKED) == "onetwo"
    seen = texts_for(view(kind="same"), [member], {"p": ASKED}, {"p": shared(ASKED, member)}, context=2)
    assert seen == [None]  # longer than the teacher can read
    with pytest.raises(ValidationError, match="at least one field"):
        view(kind="template", template="nothing {{here}}")


@pytest.mark.parametrize("special", [False, True])
def test_a_sibling_is_right_and_never_the_answer_itself(special: bool) -> None:
    tokenizer = load_tokenizer("tiny/generalist")
    if special:  # left out when ids become text
        tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    ids = {text: tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("ab", "cd", "x</think> ef")}
    members = [
        replace(rollout(str(number), [5], [*ids[text], 1], group="g"), sample=number)
        for number, text in enumerate(("ab", "cd", "ab", "x</think> ef"))
    ]
    rewards = {"0": 1.0, "1": 0.0, "2": 1.0, "3": 1.0}
    group = Group(members, tokenizer, rewards, stop_ids=(1,))
    sibling = view(kind="sibling", template="{prompt}:{sibling}", skip=1)
    words = {}
    for member in members:
        text = sibling.render(ASKED, member, group)
        assert text is not None
        words[member.id] = tokenizer.decode(text.ids[: text.spans[0][2] - 1].tolist())
        assert text.ids[text.spans[0][2] - 1 :].tolist() == member.response_ids.tolist()
        require_aligned(sibling, text, member)
    assert words == {"0": "one:ab=", "1": "one:ab=", "2": "one:ef=", "3": "one:ab="}  # the next one that is right
    assert view(kind="sibling", template="{sibling}{nowhere}").render(ASKED, members[0], group) is None
    for lone in ({"0": 1.0, "2": 0.0}, {"0": None, "1": 0.5}):
        assert sibling.render(ASKED, members[0], replace(group, rewards=lone)) is None
    silent = replace(rollout("4", [5], [1], group="g"), sample=1)  # right, but there is no text to show
    shown = sibling.render(
        ASKED, members[0], replace(group, rollouts=[members[0], silent, members[3]], rewards={"3": 1.0, "4": 1.0})
    )
    assert shown is not None
    assert tokenizer.decode(shown.ids[: shown.spans[0][2] - 1].tolist()) == "one:ef="
    with pytest.raises(ValidationError, match=r"does not name \{sibling\}"):
        view(kind="sibling", template="{prompt}")
    one: dict[str, Any] = {**RECIPE, "teachers": {"a": {"kind": "ema", "view": "sibling"}}}
    assert load_recipe({**one, "rollout": {"samples": 2, "contrast": 2}}).stages[0].uses_rewards
    with pytest.raises(RecipeError, match=r"rollout\.samples is 1"):
        load_recipe(one)


def test_the_masks_of_sdpo_are_those_of_the_paper(tmp_path: Path) -> None:
    """As in the authors' code: sample i is distilled if some sample j != i of its prompt succeeded."""
    overrides = ["rollout.prompts=16", "train.steps=1", "eval.prompts=0", "device=cpu", "store.hidden=true"]
    run = opd.run("methods/sdpo", overrides=overrides, out=tmp_path / "run")
    entries = list(run.rollouts.entries.values())
    ids = {entry.id: tuple(run.rollouts.load([entry.id])[0].response_ids.tolist()) for entry in entries}
    expected, alike = set(), 0
    for i, entry in enumerate(entries):
        successes = [j for j, other in enumerate(entries) if other.group == entry.group and other.notes["reward"] >= 1]
        others = [j for j in successes if j != i]
        if others:
            expected.add(entry.id)
            alike += all(ids[entries[j].id] == ids[entry.id] for j in others)
    assert 0 < len(expected) < len(entries) == 16 * 8
    assert alike > 10  # right answers to a sum are the same few tokens
    found = run.rollouts.signals([entry.id for entry in entries], "teacher", "hidden")
    assert set(found) == expected
    assert all(signal.mask.all() for signal in found.values())
    assert run.metrics[0]["unshown/arithmetic"] == 1 - len(expected) / len(entries)


def test_feedback_and_a_right_sibling_come_after_the_question() -> None:
    tokenizer = load_tokenizer("tiny/generalist")
    ids = {text: tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("ab", "cd")}
    members = [replace(rollout(name, [5], [*ids[text], 1], group="g"), sample=number)
               for number, (name, text) in enumerate((("0", "ab"), ("1", "cd")))]  # fmt: skip
    group = Group(members, tokenizer, {"0": 1.0, "1": 0.0}, stop_ids=(1,), feedback={"1": " off by 3 "})

    def words(number: int, **settings: Any) -> str | None:
        shown = view(kind="feedback", feedback="/{feedback}", closing="?", **settings)
        text = shown.render(ASKED, members[number], group)
        if text is None:
            return None
        require_aligned(shown, text, members[number])
        return str(tokenizer.decode(text.ids[: text.spans[0][2]].tolist()))

    assert words(0) is None  # neither feedback nor, asked for, a sibling that was right
    assert words(1) == "one/off by 3?="
    assert words(1, sibling="+{sibling}") == "one+ab/off by 3?="
    assert words(1, sibling="+{sibling}", feedback_beside_sibling=False) == "one+ab?="
    assert words(0, sibling="+{sibling}") is None
    assert words(1, longest=3) == "one/off ... ?="
    assert words(1, longest=5, keep="end") == "one/ ...  by 3?="
    assert words(1, longest=5, keep="both") == "one/off ...  3?="
    for wrong in ({"feedback": "none"}, {"sibling": "{feedback}"}, {"feedback_beside_sibling": False}, {"keep": "end"}):
        with pytest.raises(ValidationError):
            view(kind="feedback", **wrong)


def test_a_shorter_text_replaces_the_document() -> None:
    long = "much of it {and} braces, two is there too"
    asked = Prompt("p", "d", messages=({"role": "system", "content": long}, {"role": "user", "content": "q?"}),
                   fields={"document": long, "relevant": "two"})  # fmt: skip
    member = rollout("p", [5, 6], [8, 9, 1])
    context = view(kind="context")
    text = context.render(asked, member, shared(asked, member))
    expected = tiny_tokenizer()("twoq?=", add_special_tokens=False)["input_ids"]
    assert text is not None
    assert (text.ids.tolist(), text.spans) == ([*expected, 8, 9, 1], ((0, 3, len(expected), len(expected) + 3),))
    for fields in ({"document": long}, {"relevant": "two"}, {"document": "elsewhere", "relevant": "two"}):
        assert context.rewrite(replace(asked, fields=fields)) is None
    plain = Prompt("p", "d", text=f"{long} q?", fields=asked.fields)
    assert question(context.rewrite(plain) or plain) == "two q?"


def test_the_teachers_own_chat_template_changes_the_prompt_alone(tmp_path: Path) -> None:
    """Around whatever the view shows; the revision's prompt as well."""
    paths = {name: save_tiny(tmp_path / name, seed=seed) for seed, name in enumerate(("student", "teacher"))}
    tokenizer = load_tokenizer(paths["teacher"])
    tokenizer.chat_template = TEMPLATE.replace("=", "::")
    tokenizer.save_pretrained(paths["teacher"])
    settings: dict[str, Any] = {
        "student": paths["student"], "device": "cpu", "eval": {"prompts": 0}, "train": {"steps": 1},
        "rollout": {"prompts": 2, "max_new_tokens": 4}, "sampler": {"slots": 2},
        "objective": {"form": "policy_gradient"}, "prompts": {"source": "task:addition", "domain": "a", "options": {"digits": 2}},
    }  # fmt: skip
    lengths = {}
    for kind in ("same", "revision"):
        for template in ("student", "teacher"):
            read = {"chat_template": template} | (
                {} if kind == "same" else {"kind": kind}
            )  # `same` goes without saying
            run = opd.run(
                {**settings, "teachers": {"a": {"model": paths["teacher"], "view": read}}},
                out=tmp_path / kind / template,
            )
            kept = run.rollouts.signals(list(run.rollouts.entries), "teacher", "logprobs_at")
            assert len(kept) == 2
            for name, signal in kept.items():
                (entry,) = run.rollouts.load([name])
                lengths[kind, template] = signal.spans[0][2] - entry.prompt_ids.size
                assert signal.mask.all()
    assert lengths["same", "student"] == 0
    assert lengths["same", "teacher"] == 1  # two characters where the student has one
    with pytest.raises(RecipeError, match="kind ema has no chat template of its own"):
        load_recipe(
            {**settings, "teachers": {"a": {"kind": "ema", "view": {"kind": "same", "chat_template": "teacher"}}}}
        )


def test_a_view_that_leaves_no_room_for_an_answer_is_rejected_at_the_start() -> None:
    rest = {**RECIPE, "rollout": {"max_new_tokens": 4}}
    long = {"kind": "instruction", "instruction": "a" * 5000}
    for teacher in ({"model": "tiny/sorting"}, {"kind": "self"}):
        with pytest.raises(
            RecipeError, match=r"teachers\.a: with the view instruction the shortest prompt .* has 5,0.* every sample"
        ):
            make_plan(load_recipe({**rest, "teachers": {"a": {**teacher, "view": long}}}))
    make_plan(load_recipe({**rest, "teachers": {"a": {"kind": "self", "view": {**long, "instruction": "a" * 50}}}}))


def test_a_view_that_shows_nothing_for_many_steps_says_so(tmp_path: Path) -> None:
    """No answer is right, so no sibling is; and feedback comes with none of these rewards."""
    path = save_tiny(tmp_path / "model")
    for kind in ("sibling", "feedback"):
        run = opd.run({
            "student": path, "teachers": {"a": {"kind": "ema", "view": kind}}, "prompts": {"source": "task:addition", "domain": "a"},
            "rollout": {"prompts": 1, "samples": 2, "max_new_tokens": 1}, "sampler": {"slots": 2}, "train": {"steps": 9},
            "eval": {"prompts": 0}, "device": "cpu",
        }, out=tmp_path / kind)  # fmt: skip
        log = (run.directory / "log.txt").read_text()
        assert log.count("the view of teachers.a has shown nothing for 8 steps") == 1
        assert all(line["unshown/a"] == 1 for line in run.metrics)


def test_feedback_of_rewards_reaches_the_teacher_and_a_resume(tmp_path: Path) -> None:
    """It is kept beside the reward, so that a view has it again when the reward is not asked for again."""
    reward = tmp_path / "rewards.py"
    reward.write_text(
        "import opd\ndef told(sample):\n    return opd.RewardResult(0.0, feedback='no: ' + sample.text)\n"
    )
    settings = {
        "student": save_tiny(tmp_path / "model"), "teachers": {"a": {"kind": "self", "view": "feedback"}}, "rewards": f"{reward}:told",
        "prompts": {"source": "task:addition", "domain": "a"}, "rollout": {"prompts": 2, "max_new_tokens": 3}, "sampler": {"slots": 2},
        "objective": {"form": "policy_gradient"}, "train": {"steps": 1}, "eval": {"prompts": 0}, "device": "cpu",
    }  # fmt: skip
    run = opd.run(settings, out=tmp_path / "run")
    assert run.metrics[0]["unshown/a"] == 0
    for entry in run.rollouts.entries.values():
        assert entry.notes["feedback"].startswith("no: ")
        (signal,) = run.rollouts.signals([entry.id], "teacher", "logprobs_at").values()
        assert signal.view == "feedback"
        assert signal.spans[0][2] > entry.prompt_length + len("Feedback on an earlier answer") + 20


def test_a_revision_scores_the_second_copy() -> None:
    member = rollout("1", [5, 6], [8, 9, 1])
    group = shared(ASKED, member, rewards={"1": 1.0}, stop_ids=(1,))
    revision = view(kind="revision", correct="ok", wrong="no")
    phrases = {name: group.tokenizer(name, add_special_tokens=False)["input_ids"] for name in ("ok", "no")}
    for reward, phrase in ((1.0, "ok"), (0.0, "no")):
        text = revision.render(ASKED, member, replace(group, rewards={"1": reward}))
        assert text is not None
        assert text.ids.tolist() == [5, 6, 8, 9, *phrases[phrase], 8, 9, 1]
        assert text.spans == ((0, 3, 6, 9),)
        require_aligned(revision, text, member)
    assert revision.render(ASKED, member, replace(group, rewards={"1": None})) is None


def test_views_must_keep_the_response() -> None:
    class Broken(View):
        name = "broken"

        def render(self, prompt: Prompt, rollout: Rollout, group: Group) -> Rendered | None:
            return Rendered(np.array([5, 9, 8], dtype=np.int32), ((0, 2, 1, 3),))

    member = rollout("p", [5], [8, 9])
    with pytest.raises(RecipeError, match=r"view broken.*pair the response"):
        texts_for(Broken(), [member], {"p": ASKED}, {"p": shared(ASKED, member)}, 99)


def test_scores_line_up_by_response_position_under_any_spans() -> None:
    """Other prompts, first tokens left out, and a response that stands there twice."""
    model = tiny_model("llama")
    rollouts = [rollout("1", [5, 6], [8, 9, 1]), rollout("2", [10], [11, 12]), rollout("3", [7], [4, 5])]
    seen = [
        response_after(np.array([20, 21, 22, 23], dtype=np.int32), rollouts[0], skip=1),
        Rendered(np.array([10, 11, 12, 30, 31, 11, 12], dtype=np.int32), ((0, 2, 5, 7),), "twice"),
        response_after(np.array([9], dtype=np.int32), rollouts[2], skip=5),
    ]
    teacher = LocalTeacher("t", "teacher", model, 9, stop_ids=(1,))
    hidden = teacher.score(rollouts, SignalNeed("hidden"), seen)
    for number, signal in enumerate(teacher.score(rollouts, SignalNeed("logprobs_at"), seen)):
        ids = torch.from_numpy(seen[number].ids.astype(np.int64))
        with torch.no_grad():
            logprobs = model.project(model.hidden(ids, Packed.of([len(ids)]))).logits().log_softmax(-1)
        known = {
            s: t for s0, s1, t0, t1 in seen[number].spans for s, t in zip(range(s0, s1), range(t0, t1), strict=True)
        }
        for s, token in enumerate(rollouts[number].response_ids):
            assert signal.mask[s] == (s in known) == (not np.isnan(signal.values[s]))
            if s in known:
                assert signal.values[s] == pytest.approx(float(logprobs[known[s] - 1][token]), abs=1e-5)
        assert np.array_equal(torch.isnan(hidden[number].values).all(-1).numpy(), ~signal.mask)
    assert [signal.view for signal in hidden] == ["same", "twice", "same"]


TERMS = [
    {}, {"form": "k2"}, {"form": "k2", "correction": {"kind": "mis", "level": "sequence"}}, {"form": "policy_gradient"},
    {"form": "policy_gradient", "surrogate": "gspo", "advantage": {"discount": 0.5}}, {"gate": {"kind": "soft_or", "share": 0.9}},
    {"form": "policy_gradient", "advantage": {"kl_baseline": True}}, {"form": "policy_gradient", "advantage": {"whiten": True}},
    {"gate": {"kind": "selectkd", "k": 2}, "gated": "zero"}, {"correction": {"kind": "prefix"}},
]  # fmt: skip


@pytest.mark.parametrize("settings", TERMS, ids=str)
def test_what_a_teacher_did_not_see_takes_no_part(settings: dict[str, Any]) -> None:
    """Unseen rollouts change neither loss nor gradients, and unseen tokens are as if a gate had closed them."""
    student, teacher = tiny_model("llama"), LocalTeacher("t", "teacher", tiny_model("llama", 1), 99, (1,))
    rollouts = [rollout("1", [5, 6], [8, 9, 1]), rollout("2", [10], [11, 12]), rollout("3", [7, 7], [4, 5])]

    def step(members: list[Rollout], unseen: set[str], skip: int) -> tuple[float, list[torch.Tensor]]:
        objective = Objective([term(**settings)], {"t": teacher}, Rollouts(), (1,))
        signals: dict[Any, dict[str, Signal]] = {}
        for need in objective.needs(1):
            texts = [response_after(item.prompt_ids, item, skip) for item in members]
            known = {
                item.id: signal
                for item, signal in zip(members, teacher.score(members, SignalNeed(need[1]), texts), strict=True)
            }
            blank = {
                item.id: replace(known[item.id], values=np.full(item.response_ids.size, np.nan), mask=np.zeros(item.response_ids.size, bool))
                for item in members if item.id in unseen
            }  # fmt: skip
            signals[need] = known | blank
        student.module.zero_grad()
        batch = Batch(members, signals, {})
        result = train_step(student, batch, objective, KeepGradients())
        grads = [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in student.module.parameters()]
        return sum(loss for _, statistics in result.statistics for loss in statistics.loss.values()), grads

    expected, found = step(rollouts[1:], set(), 0), step(rollouts, {"1"}, 0)
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    assert math.isfinite(found[0])
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    loss, grads = step(rollouts, {"1"}, 1)
    assert math.isfinite(loss)
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)
    step(rollouts, {"1", "2", "3"}, 0)  # nothing at all


def test_entropy_is_known_where_a_teacher_was_shown_nothing() -> None:
    """Another term's comparison with a teacher must not take it away, nor a role that saw less than the one before."""
    student, members = tiny_model("llama"), [rollout("1", [5, 6], [8, 9, 1]), rollout("2", [10], [11, 12])]
    teachers = {name: LocalTeacher(name, name, tiny_model("llama", 1), 99, (1,)) for name in ("a", "b")}
    signals: dict[Any, dict[str, Signal]] = {}
    for number, (name, teacher) in enumerate(teachers.items()):  # each was shown one of the two
        found = dict(zip("12", teacher.score(members, SignalNeed("hidden")), strict=True))
        unseen = members[number]
        empty = np.zeros(unseen.response_ids.size, bool)
        signals[name, "hidden"] = found | {
            unseen.id: replace(found[unseen.id], values=np.full(empty.size, np.nan), mask=empty)
        }
    compared: Any = frozenset({("comparison", "a"), ("comparison", "b")})

    def entropies(needs: Any) -> np.ndarray:
        batch = Batch(members, signals, {})
        for _ in range(2):  # a batch that is used again is looked at again
            take_first_pass(student, [Pack.of(members)], batch, needs, teachers, ((1,),), 1.0)
        return np.concatenate([batch.first_pass.entropy[item.id] for item in members])

    alone = entropies(frozenset({("entropy",)}))
    assert np.isfinite(alone).all()
    np.testing.assert_array_equal(entropies(compared | {("entropy",)}), alone)
    np.testing.assert_allclose(entropies(compared), alone, rtol=1e-5)


# What recipes are rejected for


def test_offers_are_negotiated_when_a_recipe_is_read() -> None:
    @opd.register
    class Sampled(TeacherKind):
        name = "sampled_only"
        offers = frozenset({"logprobs_at"})

        def open(self, name: str, supplies: Any) -> Any:
            raise NotImplementedError("the recipe is only read")

    try:
        teachers = {"a": {"kind": "sampled_only"}, "b": {"model": "tiny/sorting", "role": "reference"}}
        two = [{"form": "policy_gradient", "advantage": {"reference_weight": 0.1}}, {"form": "direct"}]
        with pytest.raises(
            RecipeError, match=r"term 1: direct needs 'hidden' .*teachers\.a, of kind sampled_only, offers logprobs_at"
        ):
            load_recipe({**RECIPE, "teachers": teachers, "objective": two})
        load_recipe({**RECIPE, "teachers": teachers, "objective": two[0]})
        for key in ("rollout.teacher_share=0.5", "rollout.teacher_mix=0.1", "eval.weight_average=true"):
            with pytest.raises(
                RecipeError, match=r"needs a model in this process, but teachers\.a, of kind sampled_only"
            ):
                load_recipe(
                    {**RECIPE, "teachers": {**teachers, "c": {"kind": "sampled_only"}}, "objective": two[0]}, [key]
                )
    finally:
        del registry._registered["teacher.sampled_only"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"teachers": {"a": {"model": "tiny/sorting", "view": {"kind": "template", "template": "{solution}"}}}},
         r"teachers\.a: the view template has nothing to show.*answer, completion"),
        ({"teachers": {"a": {"model": "tiny/sorting", "view": {"kind": "sibling", "template": "{sibling} {soluton}"}}}, "rollout": {"samples": 2}},
         r"teachers\.a: the view sibling has nothing to show.*none has the field 'soluton'\. Their fields are answer, completion"),
        ({"teachers": {"a": {"model": "tiny/sorting", "view": {"kind": "template", "template": "{prompt} {anwser}"}}}},
         r"none has the field 'anwser'; did you mean 'answer'\? Their fields are .*Correct the name"),
        ({"teachers": {"a": {"model": "tiny/sorting", "view": {"kind": "context", "document": "answr"}}}},
         r"none has the field 'answr'; did you mean 'answer'\?"),
        ({"teachers": {"a": "tiny/sorting"}, "rollout": {"writers": {"kind": "shown", "share": 0.5, "view": {"kind": "template", "template": "{promt}"}}}},
         r"rollout\.writers\.0: .*none has the field 'promt'; did you mean 'prompt'\?"),
        ({"teachers": {"a": "tiny/sorting"}, "rollout": {"samples": 2, "rescue": {"view": {"kind": "template", "template": "{complettion}"}}}},
         r"rollout\.rescue: .*did you mean 'completion'\?"),
        ({"teachers": {"a": "tiny/sorting"}, "objective": {"form": "cross_entropy", "on": ["teacher"]},
          "rollout": {"demonstrations": {"template": "{promt}", "endpoint": {"address": "http://127.0.0.1:9", "model": "m"}}}},
         r"rollout\.demonstrations: .*did you mean 'prompt'\?"),
        ({"teachers": {"a": "tiny/sorting", "b": {"model": "tiny/sorting", "domains": ["a"]}}},
         "'a' scores no domain: 'a' is listed under `domains` of 'b'"),
        ({"stages": [{"name": "one", "teachers": {"a": "tiny/sorting"}}, {"name": "two", "objective": {"role": "judge"}}]},
         "stage 'two': the objective needs the role 'judge'"),
    ],
)  # fmt: skip
def test_a_plan_is_rejected_like_a_run(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        make_plan(load_recipe({**RECIPE, **changes}))


def test_a_view_is_kept_with_its_signals_and_what_it_cannot_show_is_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "add 2+2", "answer": "4"}] * 3 + [{"prompt": "add 1+2", "answer": "3", "hint": "three"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = opd.run({
        "student": "tiny/generalist", "prompts": {"source": str(file), "domain": "a", "eval_source": str(file)}, "device": "cpu",
        "teachers": {"a": {"model": "tiny/arithmetic", "view": {"kind": "template", "template": "{hint} {prompt}"}}},
        "rollout": {"prompts": 4, "samples": 1, "max_new_tokens": 4}, "objective": {"form": "policy_gradient"},
        "train": {"steps": 1}, "eval": {"prompts": 0},
    }, out=tmp_path / "run")  # fmt: skip
    assert run.metrics[0]["unshown/a"] == 0.75
    kept = run.rollouts.signals(list(run.rollouts.entries), "teacher", "logprobs_at")
    assert len(kept) == 1
    assert {(signal.view, signal.spans[0][2]) for signal in kept.values()} == {("template", len("three add 1+2"))}


def test_what_a_teacher_cannot_read_is_counted_under_any_view(tmp_path: Path) -> None:
    @opd.register
    class Short(FrozenTeacher):
        name = "short"
        by_default = False

        def open(self, name: str, supplies: TeacherInputs) -> TeacherLike:
            teacher = super().open(name, supplies)
            teacher.context = 9
            return teacher

    try:
        run = opd.run({
            "student": "tiny/generalist", "device": "cpu", "teachers": {"a": {"kind": "short", "model": "tiny/arithmetic"}},
            "rollout": {"prompts": 2, "max_new_tokens": 1}, "train": {"steps": 1}, "eval": {"prompts": 0},
        }, prompts={"a": ["1+1", "11111111+1"]}, out=tmp_path / "run")  # fmt: skip
    finally:
        del registry._registered["teacher.short"]
    assert run.metrics[0]["unshown/a"] == 0.5


def test_a_model_that_reads_does_not_name_is_reported() -> None:
    class Hasty(FrozenTeacher):
        def open(self, name: str, supplies: TeacherInputs) -> TeacherLike:
            supplies.load(ModelRef("tiny/sorting"))
            return super().open(name, supplies)

    with pytest.raises(RecipeError, match=r"loads ModelRef\(model='tiny/sorting'.*`reads` names.*'m'"):
        open_teachers({"a": Hasty(model="m")}, tiny_model("llama"), lambda ref: tiny_model("llama", 1))


def test_names_of_one_checkpoint_share_its_weights() -> None:
    loaded: list[ModelRef] = []

    def load(ref: ModelRef) -> Any:
        loaded.append(ref)
        return tiny_model("llama", 1)

    kinds: Any = {"a": spec(), "b": spec(role="reference"), "c": spec(dtype="bfloat16")}
    teachers, stop_ids = open_teachers(kinds, tiny_model("llama"), load)
    assert [ref.dtype for ref in loaded] == [spec().dtype, "bfloat16"]
    assert (teachers["a"].model is teachers["b"].model, teachers["b"].role, stop_ids) == (True, "reference", (1,))


@pytest.mark.parametrize("kind", ["llama", "gemma2"])  # the second caps its logits
def test_a_teacher_has_its_own_temperature(kind: str) -> None:
    model = tiny_model(kind, 1)
    settings: Any = Family("teacher").read({"kind": "frozen", "model": "x", "temperature": 2.0})
    teachers, _ = open_teachers({"t": settings}, tiny_model(kind), lambda ref: model)
    item = rollout("1", [5, 6, 7], [8, 9, 4])
    (signal,) = teachers["t"].score([item], SignalNeed("logprobs_at"))
    ids = torch.from_numpy(np.concatenate([item.prompt_ids, item.response_ids]).astype(np.int64))
    with torch.no_grad():
        logprobs = (model.project(model.hidden(ids, Packed.of([6]))).logits() / 2).log_softmax(-1)[2:5]
    assert signal.values == pytest.approx(logprobs[torch.arange(3), ids[3:]].numpy(), abs=1e-5)
    (hidden,) = teachers["t"].score([item], SignalNeed("hidden"))
    assert torch.allclose(teachers["t"].project(hidden.values).logits().log_softmax(-1), logprobs, atol=1e-5)


def test_teachers_as_older_runs_wrote_them_are_read() -> None:
    old = {
        "model": "tiny/sorting",
        "revision": None,
        "role": "teacher",
        "domains": None,
        "dtype": "float32",
        "batch_tokens": 9,
    }
    (stage,) = load_recipe({**RECIPE, "teachers": {"a": old}}).stages
    assert stage.teachers["a"] == FrozenTeacher(model="tiny/sorting", dtype="float32", batch_tokens=9)


@pytest.mark.parametrize("template", ["{prompt} {answer", "{prompt} {answer:>9}", "{prompt} answer}"])
def test_a_brace_without_a_field_is_rejected(template: str) -> None:
    with pytest.raises(ValidationError, match="single"):
        view(kind="template", template=template)
    assert view(kind="template", template="{{{prompt}}} {{}}")


def test_a_view_that_skips_everything_is_rejected() -> None:
    recipe = {"student": "tiny/generalist", "prompts": "task:addition", "rollout": {"max_new_tokens": 8}}
    teachers = {"addition": {"model": "tiny/arithmetic", "view": {"kind": "same", "skip": 8}}}
    with pytest.raises(RecipeError, match="skip 8 leaves nothing of 8 tokens"):
        load_recipe({**recipe, "teachers": teachers})
