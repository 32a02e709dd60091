"""Keys that would do nothing where they stand, and combinations that cannot work, are rejected when the recipe is read."""

from __future__ import annotations

from typing import Any

import pytest

from opd import registry
from opd.common.errors import RecipeError
from opd.divergences.kinds import ForwardKL, Full
from opd.recipe import load_recipe
from opd.registry import Choice
from opd.rollouts.writers import DataWriter

BASE: dict[str, Any] = {"student": "tiny/generalist", "teachers": {"t": "tiny/arithmetic"}, "prompts": "task:addition"}
PG = {"form": "policy_gradient"}
LOOK = {"kind": "template", "template": "{prompt} {answer}"}
CASES: list[tuple[dict[str, Any], str]] = [
    ({"teachers": {"t": "x", "r": {"model": "x", "role": "refrence"}}}, "refrence.*teacher"),
    ({"objective": PG, "rollout": {"data_share": 0.5}}, "data_share 0.5.*data tokens"),
    ({"objective": PG, "rollout": {"teacher_share": 0.5}}, "teacher_share 0.5"),
    ({"objective": {"gate": "turns"}}, "turns"),
    ({"eval": {"temperature": 0.5}}, "eval.temperature"),
    ({"eval": {"early_stop": {}}}, "early_stop"),
    ({"eval": {"early_stop": {}, "every": 5, "prompts": 0}}, "early_stop"),
    ({"eval": {"plateau": 5}}, "eval.plateau"),
    ({"eval": {"metric": "pass@1/a", "prompts": 0}}, "eval.metric 'pass@1/a' is watched in evaluations"),
    ({"eval": {"every": 5, "teachers": False, "early_stop": "target"}}, "compares with the teachers, and none is evaluated"),
    ({"eval": {"every": 5, "early_stop": {"kind": "target", "value": 0.5, "of_teacher": 1}}}, "two targets"),
    ({"eval": {"every": 5, "early_stop": {"kind": "target", "patience": 5}}}, "patience belongs to stop rule patience"),
    ({"eval": {"metric": "accuracy"}}, "eval.metric"),
    ({"eval": {"weight_average": True}}, "weight_average"),
    ({"rollout": {"teacher_mix": 0.2, "data_share": 0.5, "teacher_share": 0.5}}, "teacher_mix"),
    ({"rollout": {"teacher_mix": 0.2, "data_share": 0.7, "teacher_share": 0.3}}, "teacher_mix"),
    ({"rollout": {"writers": [{"kind": "teacher", "share": 0.5}]}, "teachers": None, "objective": {"form": "cross_entropy"}},
     r"rollout\.writers\.0: there is no teacher to sample from"),
    ({"rollout": {"writers": [{"kind": "teacher", "share": 0.5}]}, "teachers": {"t": {"kind": "live", "view": LOOK}}},
     r"rollout\.writers\.0 needs a model.*of kind live"),
    ({"rollout": {"writers": [{"kind": "data", "share": 0.5}]}, "objective": PG}, r"writers\.0 0\.5, but no term"),
    ({"rollout": {"writers": [{"kind": "mixed", "share": 0.5}]}}, "cannot name mixed.*teacher_mix"),
    ({"rollout": {"writers": [{"kind": "student", "share": 0.5}]}}, "cannot name student"),
    ({"rollout": {"temperature": 0, "top_k": 5}}, "top_k"),
    ({"rollout": {"data_share": 1.0, "rescue": {"view": LOOK}}}, "rescue answers again what the student failed, but others"),
    ({"rollout": {"samples": 2, "rescue": {"view": LOOK}, "writers": [{"kind": "data", "samples": 1}]}}, "the writer data has samples"),
    ({"rollout": {"teacher_mix": 0.2, "rescue": {"view": LOOK}}}, "teacher_mix 0.2 mixes a teacher in"),
    ({"rollout": {"data_share": 1.0, "demonstrations": {}}}, "demonstrations replaces answers that the student failed, but others"),
    ({"modules": {"judge": "reward_model"}, "objective": {**PG, "advantage": {"teacher_weight": 0, "also": "score"}}, "prompts": "task:dialogue",
      "rollout": {"samples": 2, "max_new_tokens": 40, "environment": {"kind": "dialogue", "history": "split"}}},
     "a reward model with an environment whose history is split"),
    ({"modules": {"judge": "discriminator"}, "objective": [{**PG, "advantage": {"teacher_weight": 0, "also": "score"}}, {"form": "cross_entropy"}],
      "rollout": {"samples": 2, "demonstrations": {"cut": "lines", "by": "exact"}}}, "an answer has tokens of both"),
    ({"rollout": {"temperature": 0, "samples": 4}}, "equal samples"),
    ({"rollout": {"prompts": 2}, "train": {"minibatches": 3}}, "minibatches"),
    ({"objective": {"gate": {"kind": "selectkd", "accept": "speculative"}}, "rollout": {"temperature": 0.7}}, "speculative"),
    ({"objective": {"coefficient": 0}}, "coefficient is 0"),
    ({"objective": {"coefficient": {"value": 0, "to": 0, "over": 5}}}, "coefficient is 0"),
    ({"objective": {"coefficient": {"after": 100}}, "train": {"steps": 100}}, "nothing is trained"),
    ({"objective": {"temperature": 1e-30}}, "temperature"),
    ({"objective": {"divergence": "acceptance", "support": "topk", "closure": "generalised"}}, "acceptance"),
    ({"checkpoint": {"keep_every": 5}}, "keep_every"),
    ({"log": {"samples": 0, "samples_every": 5}}, "samples_every"),
    ({"log": {"to": ["wandb", "wandb"]}}, "twice"),
    ({"device": "cpu", "sampler": {"compile": True}}, "compile"),
    ({"train": {"autocast": True}, "student": {"model": "smol", "dtype": "bfloat16"}}, "autocast"),
    ({"student": "stage:nope"}, "no other stage.*'nope'"),
    ({"stages": [{"name": "a"}, {"name": "b", "teachers": {"t": "stage:b"}}]}, "no other stage.*'b'; known: a"),
    ({"stages": [{"name": "a"}, {"name": "b", "log": {"to": ["wandb"]}}]}, "stages.b.log"),
    ({"stages": [{"name": "a", "eval": {"temperature": 0.5}}]}, "stages.a.eval.temperature"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), CASES)
def test_what_would_do_nothing_is_rejected(change: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        load_recipe({**BASE, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"objective": [PG, {"form": "cross_entropy"}], "rollout": {"data_share": 0.5}},
        {"objective": {"coefficient": {"value": 0, "to": 1, "over": 5}}},
        {"objective": [{"coefficient": {"until": "plateau"}}, {**PG, "coefficient": {"after": "plateau"}}], "eval": {"every": 5, "plateau": 2}},
        {"eval": {"temperature": 0.5, "k": 4}},
        {"eval": {"every": 5, "early_stop": {}, "metric": "pass@1/arithmetic"}},
        {"stages": [{"name": "a"}, {"name": "b", "teachers": {"t": "stage:a"}}]},
        {"log": {"to": ["wandb"]}, "stages": [{"name": "a"}, {"name": "b"}]},
    ],
)  # fmt: skip
def test_what_makes_sense_is_read(change: dict[str, Any]) -> None:
    assert load_recipe({**BASE, **change}).stages


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (DataWriter, {"rollout": {"writers": [{"kind": "picky", "share": 0.5}]}}),
        (ForwardKL, {"objective": {"divergence": "picky"}}),
        (ForwardKL, {"objective": {**PG, "divergence": "picky"}}),
        (Full, {"objective": {"support": "picky"}}),
    ],
)
def test_every_choice_is_asked_for_mistakes(base: type[Choice], change: dict[str, Any]) -> None:
    picky = type("Picky", (base,), {
        "name": "picky", "by_default": False, "__module__": __name__, "refuse": lambda self, view: ["not on a Sunday"],
    })  # fmt: skip
    registry.register(picky)
    try:
        with pytest.raises(RecipeError, match="not on a Sunday"):
            load_recipe({**BASE, **change})
    finally:
        del registry._registered[f"{base.family}.picky"]
