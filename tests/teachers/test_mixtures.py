"""Teachers made of several: exact in fp64 against the formulas written plainly, resumable, and rejected where they make no sense."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import opd
from opd.common.errors import RecipeError
from opd.divergences import Mixture, divergence, statistics
from opd.divergences.projection import log_probs
from opd.models.language_model import LanguageModel, Pack
from opd.recipe import load_recipe
from opd.recipe.read import recipe_schema
from opd.records import Signal, SignalNeed, TeacherLike
from opd.registry import Family
from opd.runner.plan import make_plan
from opd.teachers.kinds import TeacherInputs
from opd.teachers.mixture import PartWeight
from tests.support.crash import same_run
from tests.support.divergence_cases import heads
from tests.support.helpers import save_tiny, tiny_model
from tests.support.interrupted import SCORED, Crash, small, strike
from tests.support.rollouts import rollout

STOPS = (1, 3)
ROLLOUTS = [
    rollout("1", [5, 6, 7], [8, 9, 1], "maths"),
    rollout("2", [10], [11, 12, 3], "code"),
    rollout("3", [4], [20, 3], "other"),
]


def double(kind: str, seed: int) -> LanguageModel:
    model = tiny_model(kind, seed)
    model.module.double()
    return model


STUDENT, ONE, TWO = double("llama", 0), double("qwen2", 1), double("llama_tied", 2)
MODELS = {"one": ONE, "two": TWO, "three": double("llama", 4)}


def opened(student: LanguageModel = STUDENT, **settings: Any) -> TeacherLike:
    kind: Any = Family("teacher").read(settings)
    return kind.open("t", TeacherInputs(student, STOPS, lambda ref: MODELS[ref.model]))


def plain(model: LanguageModel) -> Tensor:
    """(N, V) log-probs of all response positions with the stop ids as one event, from whole logits."""
    batch = Pack.of(ROLLOUTS, "cpu")
    logits = model.predict(batch).logits().detach()[:, : STUDENT.size]
    merged = logits[:, list(STOPS)].logsumexp(-1, keepdim=True)
    rest = [index for index in range(logits.shape[1]) if index not in STOPS]
    return torch.cat([merged, logits[:, rest]], -1).log_softmax(-1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def normalised(logs: Tensor) -> Tensor:
    return logs.log_softmax(-1)


def arithmetic(a: Tensor, b: Tensor) -> Tensor:
    return (0.25 * a.exp() + 0.75 * b.exp()).log()


DOMAIN = torch.tensor([0.9] * 3 + [0.1] * 3 + [0.4] * 2, dtype=torch.float64)[:, None]


def aligned(a: Tensor, b: Tensor) -> Tensor:
    w = (15 * (a.exp() - b.exp()).abs().sum(-1, keepdim=True) + 1e-3).clamp(max=10)
    return normalised(a + w * (a - b))


def distant(a: Tensor, b: Tensor) -> Tensor:
    w = (0.2 + 0.3 * (a.exp() - b.exp()).abs().sum(-1, keepdim=True)).clamp(0.3, 0.7)
    return ((w * a.exp() + b.exp()) / (1 + w)).log()


BOTH = {"parts": {"a": "one", "b": "two"}}
BY_DOMAIN = {
    "a": {"value": 0.4, "domains": {"maths": 0.9, "code": 0.1}},
    "b": {"value": 0.6, "domains": {"maths": 0.1, "code": 0.9}},
}
TARGETS: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "arithmetic": ({**BOTH, "weights": {"a": 1, "b": 3}}, arithmetic),
    "equal": (BOTH, lambda a, b: (0.5 * (a.exp() + b.exp())).log()),
    "geometric": (
        {**BOTH, "combine": "geometric", "weights": {"a": 1.5, "b": -0.5}},
        lambda a, b: normalised(1.5 * a - 0.5 * b),
    ),
    "domains": ({**BOTH, "weights": BY_DOMAIN}, lambda a, b: (DOMAIN * a.exp() + (1 - DOMAIN) * b.exp()).log()),
    "geometric domains": (
        {**BOTH, "combine": "geometric", "weights": BY_DOMAIN},
        lambda a, b: normalised(DOMAIN * a + (1 - DOMAIN) * b),
    ),
    "distance": (
        {**BOTH, "weights": {"a": {"value": 0.2, "distance": 0.3, "least": 0.3, "most": 0.7}, "b": 1}},
        distant,
    ),
    "extrapolation": (
        {"kind": "extrapolation", "toward": "one", "away": "two", "by": 0.25},
        lambda a, b: normalised(1.25 * a - 0.25 * b),
    ),
    "aligndistil": (
        {"kind": "extrapolation", "toward": "one", "away": "two", "by": {"value": 1e-3, "distance": 15, "most": 10}},
        aligned,
    ),
}


def outcome(teacher: TeacherLike, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Value, loss and gradient in the student's hidden states, as a direct term has them."""
    batch = Pack.of(ROLLOUTS, "cpu")
    student = STUDENT.predict(batch).detach()
    student.hidden.requires_grad_()
    signals = teacher.score(ROLLOUTS, SignalNeed("hidden"))
    source = teacher.project(torch.cat([signal.values for signal in signals]))
    found = divergence(kind, student, source, merge=[STOPS])
    return found.value, found.loss.detach(), torch.autograd.grad(found.loss, student.hidden)[0]


def written(target: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Loss per token and gradient of a formula of the student's log-probs (N, V'), stop ids as one event."""
    batch = Pack.of(ROLLOUTS, "cpu")
    student = STUDENT.predict(batch).detach()
    student.hidden.requires_grad_()
    logits = student.logits(STUDENT.size)
    rest = [index for index in range(logits.shape[1]) if index not in STOPS]
    events = torch.cat([logits[:, list(STOPS)].logsumexp(-1, keepdim=True), logits[:, rest]], -1).log_softmax(-1)
    value = target(events)
    return value.detach(), torch.autograd.grad(value.sum(), student.hidden)[0]


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl"])
@pytest.mark.parametrize("name", TARGETS)
def test_loss_and_gradient_are_those_of_the_formula(name: str, kind: str) -> None:
    settings, formula = TARGETS[name]
    target = formula(plain(ONE), plain(TWO))
    value, _, gradient = outcome(opened(**{"kind": "mixture", **settings}), kind)
    expected, slope = written(lambda s: kl(s, target) if kind == "reverse_kl" else kl(target, s))
    torch.testing.assert_close(value, expected, atol=1e-10, rtol=1e-9)
    torch.testing.assert_close(gradient, slope, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("name", TARGETS)
def test_logprobs_are_those_of_the_formula_and_follow_from_hidden_states(name: str) -> None:
    settings, formula = TARGETS[name]
    teacher, target = opened(**{"kind": "mixture", **settings}), formula(plain(ONE), plain(TWO))
    places = {token: place + 1 for place, token in enumerate(i for i in range(STUDENT.size) if i not in STOPS)}
    tokens = np.concatenate([item.response_ids for item in ROLLOUTS])
    rows = [target[row, 0 if token in STOPS else places[token]] for row, token in enumerate(tokens.tolist())]
    found = teacher.score(ROLLOUTS, SignalNeed("logprobs_at"))
    np.testing.assert_allclose(np.concatenate([signal.values for signal in found]), torch.stack(rows), rtol=1e-9)
    hidden = {item.id: part for item, part in zip(ROLLOUTS, teacher.score(ROLLOUTS, SignalNeed("hidden")), strict=True)}
    for one, other in zip(teacher.score(ROLLOUTS, SignalNeed("logprobs_at", hidden=hidden)), found, strict=True):
        np.testing.assert_array_equal(one.values, other.values)


@pytest.mark.parametrize("weights", [{"a": 0.3, "b": 2.0}, BY_DOMAIN])
def test_a_sum_is_the_weighted_sum_of_reverse_kls(weights: dict[str, Any]) -> None:
    a, b = plain(ONE), plain(TWO)
    first, second = (0.3, 2.0) if weights is not BY_DOMAIN else (DOMAIN[:, 0], 1 - DOMAIN[:, 0])
    _, loss, gradient = outcome(opened(kind="mixture", combine="sum", **BOTH, weights=weights), "reverse_kl")
    value, slope = written(lambda s: first * kl(s, a) + second * kl(s, b))
    torch.testing.assert_close(loss, value.sum(), atol=1e-10, rtol=1e-9)
    torch.testing.assert_close(gradient, slope, atol=1e-10, rtol=1e-9)


def test_aligndistil_divides_the_loss_by_how_far_it_goes() -> None:
    settings = TARGETS["aligndistil"][0] | {"divide": True}
    a, b = plain(ONE), plain(TWO)
    w = (15 * (a.exp() - b.exp()).abs().sum(-1) + 1e-3).clamp(max=10)
    _, loss, gradient = outcome(opened(**settings), "reverse_kl")
    value, slope = written(lambda s: kl(s, aligned(a, b)) / w)
    torch.testing.assert_close(loss, value.sum(), atol=1e-10, rtol=1e-9)
    torch.testing.assert_close(gradient, slope, atol=1e-10, rtol=1e-9)


def test_veto_multiplies_the_teacher_by_the_current_student() -> None:
    weights = {"expert": 1, "student": {"value": 0.8, "to": 0.0, "over": 5}}
    parts = {"expert": "one", "student": {"kind": "live"}}
    teacher = opened(kind="mixture", combine="geometric", parts=parts, weights=weights)
    for step, beta in [(1, 0.8), (2, 0.6), (3, 0.4), (4, 0.2), (5, 0.0), (6, 0.0)]:
        target = normalised(plain(ONE) + beta * plain(STUDENT))
        value, _, gradient = outcome(teacher, "forward_kl")
        expected, slope = written(lambda s, target=target: kl(target, s))
        torch.testing.assert_close(value, expected, atol=1e-10, rtol=1e-9)
        torch.testing.assert_close(gradient, slope, atol=1e-10, rtol=1e-9)
        teacher.observe(step, STUDENT.weights(step))
        assert teacher.version == step


@pytest.mark.parametrize("combine", ["arithmetic", "geometric", "sum"])
def test_a_student_that_is_the_mixture_has_no_loss_and_no_gradient(combine: str) -> None:
    teacher = opened(kind="mixture", combine=combine, parts={"a": {"kind": "self"}, "b": {"kind": "self"}})
    value, loss, gradient = outcome(teacher, "reverse_kl")
    assert value.abs().max() < 1e-12
    assert abs(loss) < 1e-12
    assert gradient.abs().max() < 1e-12


@given(
    seed=st.integers(0, 500),
    kind=st.sampled_from(["arithmetic", "geometric", "sum"]),
    merge=st.sampled_from([(), ((0, 3), (2, 9, 5))]),
    temperature=st.sampled_from([1.0, 0.7]),
    weight=st.sampled_from(["none", "mask", "gate"]),
    factor=st.booleans(),
    chunk=st.sampled_from([1, 3, 100]),
)
def test_weights_per_token_are_the_same_in_blocks_and_at_once(
    seed: int, kind: Any, merge: tuple, temperature: float, weight: str, factor: bool, chunk: int
) -> None:
    weights: dict[str, Any] = {
        "none": None,
        "mask": torch.tensor([1.0, 0, 2, 0, 0.5]),
        "gate": lambda rows: rows.entropy + 1,
    }
    results = []
    for backend in ("reference", "chunked"):
        (student, one), (_, two) = heads(seed), heads(seed + 1)
        per_token = torch.tensor([0.2, 0.0, 1.5, 2.0, 0.7], dtype=torch.float64)
        mixture = Mixture([one, two], [per_token, 1.0], kind, per_token + 1 if factor else None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("opd.divergences.compute.CHUNK_BYTES", chunk * 4 * 11)
            found = divergence(
                "reverse_kl",
                student,
                mixture,
                merge=merge,
                temperature=temperature,
                weight=weights[weight],
                backend=backend,
            )
        results.append((found.value, found.loss.detach(), torch.autograd.grad(found.loss, student.hidden)[0]))
        logs = [log_probs(part, 11, merge, temperature) for part in (one, two)]
        shares = torch.stack([per_token, torch.ones(5, dtype=torch.float64)])
        s = log_probs(student, 11, merge, temperature).detach()
        if kind == "sum" and weight == "none":
            each = torch.stack([(s.exp() * (s - log)).sum(-1) for log in logs])
            expected = (shares * each).sum(0) * (per_token + 1 if factor else 1)
            torch.testing.assert_close(found.loss.detach(), expected.sum())
    for one_way, other in zip(*results, strict=True):
        torch.testing.assert_close(one_way, other)


def test_sums_are_of_reverse_kls_alone() -> None:
    (student, one), (_, two) = heads(0), heads(1)
    with pytest.raises(ValueError, match="sum of reverse KLs"):
        divergence("forward_kl", student, Mixture([one, two], [1, 1], "sum"))
    with pytest.raises(ValueError, match="sum of reverse KLs"):
        divergence("reverse_kl", student, Mixture([one, two], [1, 1], "sum"), support="topk", k=3)
    with pytest.raises(ValueError, match="a sum: weights"):
        Mixture([one, two], [1, -1], "sum")
    assert statistics(student, Mixture([one, two], [torch.ones(5), 1.0])).value is not None


def test_weights_follow_a_line_or_a_cosine_and_domains_have_their_own() -> None:
    line = PartWeight(value=1, to=0, over=5, domains={"maths": 0.3})
    assert [line.at(step) for step in (1, 2, 3, 5, 9)] == [1, 0.75, 0.5, 0, 0]
    assert line.at(3, "maths") == 0.3
    curve = PartWeight(value=1, to=0, over=5, curve="cosine")
    assert curve.at(2) == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert (curve.at(1), curve.at(5)) == (1, pytest.approx(0))


def test_parts_that_move_are_kept_and_restored() -> None:
    def made() -> TeacherLike:
        model = tiny_model("llama")
        parts = {"mean": {"kind": "ema", "rate": 0.3}, "new": {"kind": "refresh", "every": 2}, "expert": "one"}
        return opened(
            model,
            kind="mixture",
            parts=parts,
            weights={"mean": 1, "new": 1, "expert": {"value": 1, "to": 0, "over": 9}},
        )

    student, teacher = tiny_model("llama"), made()
    for step in (1, 2, 3):
        with torch.no_grad():
            for parameter in student.trainable().values():
                parameter.add_(0.1 * torch.randn_like(parameter))
        teacher.observe(step, student.weights(step))
    kept = {key: value.clone() for key, value in teacher.state().items()}
    assert kept["versions"].tolist() == [3, 1, 0]
    again = made()
    again.restore(teacher.version, kept)

    def says(one: TeacherLike) -> list[Signal]:
        return one.score(ROLLOUTS, SignalNeed("logprobs_at"))

    for one, other in zip(says(teacher), says(again), strict=True):
        np.testing.assert_array_equal(one.values, other.values)
        assert one.teacher_version == other.teacher_version == 3
    constant = opened(kind="mixture", **BOTH)
    constant.observe(1, STUDENT.weights(1))
    assert (constant.version, constant.state()) == (0, {})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {name: save_tiny(folder / name, seed=seed) for seed, name in enumerate(["student", "teacher", "other"])}


@pytest.mark.slow
def test_a_resumed_run_continues_with_the_same_mixture(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"expert": {"value": 0.2, "to": 1.0, "over": 3, "domains": {"b": 2.0}}, "mean": 1.0}
    teacher = {"kind": "mixture", "combine": "geometric", "weights": weights}
    teacher["parts"] = {"expert": models["teacher"], "mean": {"kind": "ema", "rate": 0.3}}
    sources = [{"source": "task:addition", "domain": domain} for domain in ("a", "b")]
    spec = small(
        models,
        teachers={"t": teacher},
        prompts=sources,
        objective=[{"form": "direct"}, {"form": "policy_gradient"}],
        eval={"prompts": 0},
        store={"hidden": True},
        checkpoint={"resume": "exact", "every": 1},
    )
    reference = opd.run(spec, out=tmp_path / "reference")
    assert reference.metrics[0]["reverse_kl"] > 0
    strike(monkeypatch, SCORED, 4, Crash)
    with pytest.raises(Crash):
        opd.run(spec, out=tmp_path / "run")
    same_run(opd.resume(tmp_path / "run"), reference)


PROMPTS = [{"source": "task:addition", "domain": "t"}]
TINY: dict[str, Any] = {"a": "tiny/arithmetic", "b": "tiny/generalist"}


def recipe(teacher: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"student": "tiny/generalist", "teachers": {"t": teacher}, "prompts": PROMPTS, "device": "cpu", **changes}


def mixed(**settings: Any) -> dict[str, Any]:
    return {"kind": "mixture", "parts": TINY, **settings}


def past(**settings: Any) -> dict[str, Any]:
    return {"kind": "extrapolation", "toward": "tiny/arithmetic", "away": "tiny/generalist", **settings}


LIVE = {"kind": "live"}


@pytest.mark.parametrize(
    ("teacher", "changes", "words"),
    [
        (mixed(weights={"a": 1, "b": -0.5}), {}, "must not be negative.*geometric can subtract"),
        (mixed(weights={"a": 0, "b": 0}), {}, "sum above 0"),
        (mixed(combine="geometric", weights={"a": 1, "b": -1}), {}, "sum above 0"),
        (
            mixed(combine="geometric", weights={"a": 1, "b": {"value": 0, "to": -2, "over": 7}}),
            {},
            "at step 7 they are a 1, b -2",
        ),
        (mixed(weights={"a": {"domains": {"t": -1}}, "b": 1}), {}, "in domain t"),
        (mixed(combine="sum", weights={"a": {"distance": -1}, "b": 0.5}), {}, "2 apart"),
        (mixed(weights={"a": 1}), {}, "one for each part"),
        (mixed(parts={"a": "tiny/arithmetic"}), {}, "at least 2"),
        (mixed(parts={**TINY, "c": mixed()}), {}, "list its parts here"),
        (mixed(parts={**TINY, "c": LIVE}, weights={"a": {"distance": 1}, "b": 1, "c": 1}), {}, "between two parts"),
        (mixed(parts={**TINY, "c": {"kind": "self", "role": "reference"}}), {}, "`role` applies to the mixture"),
        (
            mixed(parts={**TINY, "c": {"kind": "self", "view": {"kind": "instruction", "instruction": "x"}}}),
            {},
            "`view` applies to the mixture",
        ),
        (mixed(parts={**TINY, "c": {"kind": "base"}}), {}, "part c: kind base .* Set student.lora"),
        (mixed(parts={"a": LIVE, "b": LIVE}), {}, "never differ"),
        (mixed(parts={**TINY, "c": {"kind": "cached", "run": "/tmp/x"}}), {}, "Use the teacher itself"),
        (mixed(weights={"a": {"value": 1, "to": 2}, "b": 1}), {}, "belong together"),
        (mixed(weights={"a": {"value": 1, "curve": "cosine"}, "b": 1}), {}, "set `to` and `over`"),
        (mixed(weights={"a": {"most": 1}, "b": 1}), {}, "depends on `distance`"),
        (mixed(combine="sum"), {"objective": {"divergence": "forward_kl"}}, "sum of reverse KLs"),
        (mixed(combine="sum"), {"objective": {"form": "policy_gradient"}}, "sum of reverse KLs"),
        (mixed(combine="sum"), {"objective": {"support": "topk", "k": 4}}, "sum of reverse KLs"),
        (mixed(combine="sum"), {"objective": {"gate": {"kind": "teacher_entropy", "below": 1}}}, "sum of reverse KLs"),
        (mixed(), {"rollout": {"teacher_share": 0.5}}, "of kind mixture, has none"),
        (past(by=-0.5), {}, "lies between the two teachers"),
        (past(by=0, divide=True), {}, "above 0"),
        (past(divide=True), {"objective": {"form": "k2"}}, "divide: false"),
        (
            mixed(
                parts={"a": {"kind": "refresh", "every": 2}, "b": "tiny/arithmetic"},
                view={"kind": "instruction", "instruction": "x"},
            ),
            {},
            "part a: .*collapsed",
        ),
    ],
)
def test_mixtures_that_make_no_sense_are_rejected(teacher: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=f"(?s){words}"):
        load_recipe(recipe(teacher, **changes))


def test_weights_for_domains_that_no_prompt_has_and_students_that_sharpen_are_reported() -> None:
    with pytest.raises(RecipeError, match="domain 'maths', which no prompt has"):
        make_plan(load_recipe(recipe(mixed(weights={"a": {"domains": {"maths": 1}}, "b": 1}))))
    chased = mixed(combine="geometric", parts={"a": "tiny/arithmetic", "b": LIVE}, weights={"a": 1, "b": 1})
    (plan,) = make_plan(load_recipe(recipe(chased)))
    assert any("keeps sharpening" in note for note in plan.notes)
    assert plan.teachers["t"] > 0


def test_parts_may_be_paths_next_to_the_recipe_and_are_in_the_schema(tmp_path: Path) -> None:
    import yaml

    (tmp_path / "own").mkdir()
    spec = recipe(mixed(parts={"a": "./own", "b": {"model": "./own"}}))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(spec))
    kind: Any = load_recipe(tmp_path / "mine.yaml").stages[0].teachers["t"]
    assert {ref.model for ref in kind.reads()} == {str(tmp_path / "own")}
    assert kind == type(kind).model_validate({k: v for k, v in kind.model_dump(mode="json").items() if k != "kind"})
    parts = recipe_schema()["$defs"]["MixtureTeacher"]["properties"]["parts"]["additionalProperties"]["anyOf"]
    assert {"type": "string"} in parts
    assert {"$ref": "#/$defs/MixtureTeacher"} not in parts


def test_by_hand() -> None:
    student = opd.load_model("tiny/generalist")
    teacher = opd.Teacher({"kind": "mixture", "parts": TINY}, student)
    rollouts = opd.Sampler(student, max_new_tokens=4).sample(opd.prompts("task:addition", 2))
    batch = Pack.of(rollouts, "cpu")
    found = opd.divergence("reverse_kl", student.predict(batch), teacher.predict(batch), merge=[student.stop_ids])
    found.loss.backward()
    assert float(found.loss.detach()) > 0
