"""Terms on hidden states: losses and gradients against their definitions in fp64, and what they bring two tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import opd
from opd.common.errors import ModelError, RecipeError
from opd.loop.oom_retry import micro_batches
from opd.models.language_model import LanguageModel
from opd.models.modules import AnyModule, Module, open_modules
from opd.objective.batch import Batch
from opd.objective.objective import Objective
from opd.recipe import Rollouts, load_recipe
from opd.records import Rendered, Rollout
from opd.registry import validate_settings
from opd.teachers.scoring import LocalTeacher
from tests.support.helpers import EOS, tiny_model
from tests.support.rollouts import STOPS, some_rollouts

SIZE, TEMPERATURE = 78, 1.5  # ids of the tokenizer; the models have a few more
WIDTHS = {"student": 32, "teacher": 24}
MATCHED = np.arange(2, 40), np.arange(60, 22, -1)  # ids that mean the same, where the tokenizers differ


def models(same_width: bool = False) -> tuple[LanguageModel, LanguageModel]:
    student = tiny_model(initializer_range=0.3)
    teacher = tiny_model(seed=1, initializer_range=0.3, hidden_size=32 if same_width else WIDTHS["teacher"])
    for model in (student, teacher):
        model.module.double()
    student.module.requires_grad_(True)
    return student, teacher


def texts(crossed: bool) -> tuple[list[Rollout], list[Rendered]]:
    """Rollouts, and what the teacher reads: the same ids, or other ids with a token that covers two of the student's, and the reverse."""
    rollouts, seen = some_rollouts(count=6), []
    generator = np.random.default_rng(5)
    for item in rollouts:
        asked, size = item.prompt_ids.size, item.response_ids.size
        if not crossed:
            ids, spans = np.concatenate([item.prompt_ids, item.response_ids]), [(0, size, asked, asked + size)]
        else:
            cuts = [(s, s + 1, 1) for s in range(size)]
            if size > 4:
                cuts = [(0, 2, 1), (2, 3, 1), (3, 4, 2), *((s, s + 1, 1) for s in range(4, size))]
            spans, at = [], asked
            for s0, s1, length in cuts:
                spans.append((s0, s1, at, at + length))
                at += length
            answer = [*generator.integers(2, 70, size=at - asked - 1), EOS]
            ids = np.concatenate([item.prompt_ids, answer])
        seen.append(Rendered(ids.astype(np.int32), tuple(spans), crossed=crossed))
    return rollouts, seen


def opened(
    student: LanguageModel, teacher: LanguageModel, crossed: bool, kind: dict[str, Any]
) -> tuple[LocalTeacher, Module]:
    judge = LocalTeacher("judge", "teacher", teacher, 64, STOPS)
    judge.matched = MATCHED if crossed else None
    kinds = validate_settings("modules", dict[str, AnyModule], {"spaces": {"kind": "projectors", **kind}})
    return judge, open_modules(kinds, student, 0, {"judge": judge})["spaces"]


def through_the_objective(term: dict[str, Any], kind: dict[str, Any], crossed: bool, budget: int) -> tuple[float, dict[str, Tensor]]:  # fmt: skip
    student, teacher = models(same_width=term["form"] == "representation")
    judge, spaces = opened(student, teacher, crossed, kind)
    rollouts, seen = texts(crossed)
    objective = Objective([{"coefficient": 0.7, **term}], {"judge": judge}, Rollouts(), STOPS)
    ((role, kind_of_signal),) = objective.needs(1)
    found = judge.score(rollouts, objective.need_given({}, role, kind_of_signal), seen)
    signals: Any = {(role, kind_of_signal): {item.id: one for item, one in zip(rollouts, found, strict=True)}}
    batch = Batch(rollouts, signals, {})
    objective.modules = {"spaces": spaces}

    def cut(some: Any) -> Any:
        return micro_batches(some, budget, student.device, {})

    prepared = objective.prepare(student, batch, 1, cut)
    total, weights = 0.0, prepared.weights(rollouts)
    for pack in cut(rollouts):
        loss, _ = objective(student, pack, prepared, weights)
        loss.backward()
        total += float(loss.detach())
    return total, grads({**student.trainable(), **spaces.parameters()})


def states_of(module: Any, prompt: np.ndarray, answer: np.ndarray, layer: int = -1) -> Tensor:
    ids = torch.tensor(np.concatenate([prompt, answer]).astype(np.int64))
    states = module.model(input_ids=ids[None], output_hidden_states=True).hidden_states[layer]
    found: Tensor = states[0][prompt.size - 1 : -1]
    return found


def forward_kl(teacher: Tensor, student: Tensor) -> Tensor:
    p, q = ((side[:, :SIZE] / TEMPERATURE).log_softmax(-1) for side in (teacher.detach(), student))
    return (p.exp() * (p - q)).sum(-1)


def distance(term: dict[str, Any], ours: Any, theirs: Any) -> Tensor:
    numbers = {"last": [-1], "all": [1, 2], "odd": [2]}[term.get("layers", "last")]
    pairs = [(states_of(*ours, layer=number), states_of(*theirs, layer=number)) for number in numbers]
    return torch.stack([((mine - other) ** 2).mean(-1).sum() for mine, other in pairs]).mean()


def embedded(head: Tensor, ids: np.ndarray) -> Tensor:
    rows = head[torch.tensor(ids.astype(np.int64))]
    return torch.cat([torch.cat([torch.zeros_like(rows[:1]), rows[:-1]]), rows], dim=-1)


def said_by(logits: Tensor, crossed: bool) -> np.ndarray:
    """The student's ids of the teacher's likeliest tokens; -1: it has none."""
    found = logits.argmax(-1).numpy()
    table = dict(zip(MATCHED[1].tolist(), MATCHED[0].tolist(), strict=True)) | {EOS: EOS}
    return np.array([table.get(int(label), -1) for label in found]) if crossed else found


def by_hand(term: dict[str, Any], kind: dict[str, Any], crossed: bool) -> tuple[float, dict[str, Tensor]]:
    """The same, answer by answer, from stock modules and plain arithmetic."""
    same_width = term["form"] == "representation"
    student, teacher = (model.module for model in models(same_width))
    for module in (student, teacher):
        module.set_attn_implementation("eager")
    teacher.requires_grad_(False)
    _, spaces = opened(*models(same_width), crossed, kind)
    maps = {name: weight.detach().clone().requires_grad_(True) for name, weight in spaces.parameters().items()}

    def mapped(name: str, states: Tensor) -> Tensor:
        return states @ maps[f"{name}.weight"].T + maps[f"{name}.bias"]

    rollouts, seen = texts(crossed)
    count = sum(item.response_ids.size for item in rollouts)
    head_s, head_t = student.lm_head.weight, teacher.lm_head.weight
    total = torch.zeros((), dtype=torch.float64)
    for item, text in zip(rollouts, seen, strict=True):
        theirs = text.ids[item.prompt_ids.size :]
        h_s = states_of(student, item.prompt_ids, item.response_ids)
        h_t = states_of(teacher, item.prompt_ids, theirs)
        if term["form"] == "representation":
            total = total + distance(
                term, (student, item.prompt_ids, item.response_ids), (teacher, item.prompt_ids, theirs)
            )
            continue
        if kind.get("start") == "heads":
            ours, other = (
                (head[:82] for head in (head_s, head_t)) if not crossed else (head_s[MATCHED[0]], head_t[MATCHED[1]])
            )
            to_teacher = h_s @ (torch.linalg.pinv(other) @ ours.detach()).T
        else:
            to_teacher = mapped("to_teacher", h_s)
        if kind["align"] == "attention":
            std = head_t.std()
            query = mapped("query", embedded(head_s.detach(), item.response_ids))
            score = query @ (embedded(head_t, theirs) / std).T / (2 * h_t.shape[1]) ** 0.5
            values = h_t / (h_t**2).mean(-1, keepdim=True).sqrt() + head_t[torch.tensor(theirs.astype(np.int64))] / std
            t2s, s2t = score.softmax(-1) @ mapped("to_student", values), score.T.softmax(-1) @ to_teacher
            rows, columns = np.arange(item.response_ids.size), np.arange(theirs.size)
        else:
            start = item.prompt_ids.size
            cells = text.spans if crossed else [(s, s + 1, start + s, start + s + 1) for s in range(theirs.size)]
            pairs = [(s0, t0 - start) for s0, s1, t0, t1 in cells if s1 - s0 == t1 - t0 == 1]
            rows, columns = (np.array(column) for column in zip(*pairs, strict=True))
            t2s, s2t = mapped("to_student", h_t[columns]), to_teacher[rows]
        space = t2s @ head_s.detach().T
        labels = item.response_ids[rows].astype(np.int64)
        if term.get("labels") == "teacher":
            labels = said_by((h_t[columns] @ head_t.T)[:, :SIZE], crossed)
        exists = torch.tensor(labels >= 0)
        wanted = torch.tensor(labels).clamp(min=0)
        agrees = exists & (space[:, :SIZE].argmax(-1) == wanted)
        predicted = -space[:, :SIZE].log_softmax(-1).gather(1, wanted[:, None])[:, 0]
        total = total + predicted[exists].sum()
        taught = forward_kl(space, h_s[rows] @ head_s.T)
        total = total + taught[agrees if term.get("masked", True) else exists].sum()
        total = total + forward_kl(h_t[columns] @ head_t.T, s2t @ head_t.T).sum()
    loss = 0.7 * total / count
    loss.backward()
    return float(loss.detach()), grads({**dict(student.named_parameters()), **maps})


def grads(parameters: dict[str, Any]) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in parameters.items() if weight.grad is not None}


DUAL = {"form": "dskd", "temperature": TEMPERATURE}
CASES = {
    "representation": ({"form": "representation"}, {"align": "tokens"}, False),
    "all layers": ({"form": "representation", "layers": "all"}, {"align": "tokens"}, False),
    "every second layer": ({"form": "representation", "layers": "odd"}, {"align": "tokens"}, False),
    "one tokenizer": (DUAL, {"align": "tokens"}, False),
    "from the heads": ({**DUAL, "labels": "teacher"}, {"align": "tokens", "start": "heads"}, False),
    "attention": (DUAL, {"align": "attention"}, False),
    "two tokenizers": ({**DUAL, "masked": False}, {"align": "attention"}, True),
    "same tokens of two": ({**DUAL, "labels": "teacher", "masked": False}, {"align": "tokens", "start": "heads"}, True),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_the_definition(case: str) -> None:
    wanted_loss, wanted = by_hand(*CASES[case])
    for budget in (10**6, 16):  # however the batch is cut up
        loss, found = through_the_objective(*CASES[case], budget)
        assert loss == pytest.approx(wanted_loss, rel=1e-5)
        assert found.keys() >= wanted.keys()
        for name, gradient in wanted.items():  # weights of tokens are float32
            assert float((found[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()) + 1e-12, name


def test_maps_between_heads_keep_what_both_can_say() -> None:
    """A teacher that is the student in rotated coordinates: its states come back as the student's own."""
    student, teacher = models(same_width=True)
    rotation = torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    with torch.no_grad():
        teacher.head.weight.copy_(student.head.weight @ rotation)
    _, spaces = opened(student, teacher, False, {"align": "tokens", "start": "heads"})
    states: Any = torch.randn(5, 32, dtype=torch.float64)
    torch.testing.assert_close(spaces.to_student(states @ rotation), states)  # type: ignore[attr-defined]
    torch.testing.assert_close(spaces.to_teacher(states, student.head.weight), states @ rotation)  # type: ignore[attr-defined]


def test_the_teachers_head_is_inverted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, solve = [0], torch.linalg.pinv

    def counted(matrix: Tensor) -> Tensor:
        calls[0] += 1
        found: Tensor = solve(matrix)
        return found

    monkeypatch.setattr(torch.linalg, "pinv", counted)
    through_the_objective(*CASES["from the heads"], budget=16)  # several micro-batches
    assert calls == [2]  # the map to the student at the start, and the teacher's
    student, teacher = models()
    judge, spaces = opened(student, teacher, False, {"align": "tokens", "start": "heads"})
    states, head = torch.randn(5, WIDTHS["student"], dtype=torch.float64), student.head.weight
    before = spaces.to_teacher(states, head)  # type: ignore[attr-defined]
    with torch.no_grad():
        teacher.head.weight.mul_(2)
    judge.version += 1  # a teacher that follows the student
    torch.testing.assert_close(spaces.to_teacher(states, head), before / 2)  # type: ignore[attr-defined]


def test_states_of_other_widths_are_not_compared() -> None:
    student, teacher = models()
    judge = LocalTeacher("judge", "teacher", teacher, 64, STOPS)
    trainer = opd.Trainer(student, opd.Objective({"form": "representation"}, judge))
    with pytest.raises(ModelError, match=r"the student's have 32 and the teacher's 24\. Use form: dskd"):
        trainer.step(trainer.batch(some_rollouts()))


def test_layers_of_models_of_other_depths_are_not_compared() -> None:
    student, teacher = tiny_model(), tiny_model(seed=1, num_hidden_layers=3)
    student.module.requires_grad_(True)
    judge = LocalTeacher("judge", "teacher", teacher, 64, STOPS)
    trainer = opd.Trainer(student, opd.Objective({"form": "representation", "layers": "all"}, judge))
    with pytest.raises(ModelError, match=r"compares 2 layers of the student with 3 of the teacher\. Use layers: last"):
        trainer.step(trainer.batch(some_rollouts()))


RECIPE: dict[str, Any] = {
    "student": "tiny/generalist",
    "teachers": {"arithmetic": {"model": "tiny/pairs", "view": "bytes"}},
    "prompts": [{"source": "task:addition", "domain": "arithmetic"}],
    "rollout": {"prompts": 8, "data_share": 1, "max_new_tokens": 8},
    "modules": {"spaces": {"kind": "projectors"}},
    "objective": {"form": "dskd"},
    "train": {"steps": 2},
    "eval": {"prompts": 0},
    "log": {"start_table": False},
    "device": "cpu",
}
MIXTURE = {"kind": "mixture", "parts": {"a": "tiny/arithmetic", "b": "tiny/sorting"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"prompts": 8}}, "Set labels: teacher, or on:"),
        ({"modules": {"spaces": "head"}}, "as one of kind projectors, and it is a head"),
        ({"objective": [{"form": "dskd"}, {"form": "value", "module": "spaces"}]}, "kind"),
        ({"objective": {"form": "cross_entropy"}}, "no term of the objective uses it"),
        ({"modules": {"spaces": {"kind": "projectors", "role": "other"}}}, "the role 'other' has none"),
        ({"objective": {"form": "dskd", "labels": "teacher"}}, "Set modules.spaces.align: tokens"),
        ({"objective": {"form": "dskd", "divergence": "skew_kl", "adapt": True}}, "own alpha of skew_kl"),
        ({"teachers": {"arithmetic": MIXTURE}}, "is a mixture, which has no hidden states of its own"),
        ({"teachers": {"arithmetic": MIXTURE}, "modules": {}, "objective": {"form": "representation"}, "rollout": {"prompts": 8}},
         "representation: teachers.arithmetic is a mixture"),
        ({"modules": {}, "objective": [{"form": "representation", "layers": "all"}, {"form": "representation", "layers": "odd"}]}, "a pass keeps one set"),
        ({"modules": {}, "objective": {"form": "representation", "layers": "all"}, "train": {"steps": 2, "learn": False}}, "Use layers: last"),
        ({"teachers": {"arithmetic": {"kind": "served", "address": "http://x", "model": "y"}}, "modules": {}, "objective": {"form": "representation", "layers": "all"}},
         "representation needs 'layers' of the role 'teacher'"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_said_when_the_recipe_is_read(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(RECIPE | changes)


def test_maps_are_saved_and_resumed_with_the_same_bits(tmp_path: Path) -> None:
    whole = opd.run(RECIPE, out=tmp_path / "whole")
    opd.run(RECIPE, overrides=["train.steps=1"], out=tmp_path / "parts")
    run = opd.resume(tmp_path / "parts", overrides=["train.steps=2"])
    assert run.metrics[-1]["loss"] == whole.metrics[-1]["loss"]
    assert run.metrics[-1]["grad_norm/spaces"] > 0
    names = {path.name for path in (run.model / "modules" / "spaces").iterdir()}
    assert names == {"weights.safetensors", "optimiser.safetensors"}


@pytest.mark.slow
def test_without_the_data_dual_space_teaches_across_tokenizers_and_uld_does_not(tmp_path: Path) -> None:
    """On the student's own samples alone, at equal steps. ULD does not know what tokens are called."""
    forms = {
        "dskd": {"form": "dskd", "labels": "teacher", "masked": False},
        "uld": {"form": "uld", "aggregate": "sequence_mean"},
    }
    maps = {"spaces": {"kind": "projectors", "align": "tokens", "start": "heads", "lr": 5e-4}}
    scores = {}
    for name, term in forms.items():
        recipe = {
            **RECIPE,
            "rollout": {"prompts": 64, "max_new_tokens": 16},
            "modules": maps if name == "dskd" else {},
            "objective": term,
            "train": {"steps": 20, "lr": 5e-4, "warmup": 5},
            "eval": {"prompts": 200, "teachers": False},
            "threads": 1,
        }
        scores[name] = opd.run(recipe, out=tmp_path / name).summary["stages"][0]["evals"]["arithmetic"]
    assert scores["dskd"]["after"] > scores["dskd"]["before"]
    assert scores["uld"]["after"] < scores["uld"]["before"]
