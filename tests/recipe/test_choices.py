"""Choices of a recipe: every one reads and writes itself, stands in the schema, and refuses what means nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
import torch
from pydantic import BaseModel, Field, ValidationError

from opd import registry
from opd.common.errors import RecipeError
from opd.data.sources import SOURCES
from opd.divergences import Projection
from opd.divergences.kinds import CustomDivergence
from opd.engines.kinds import SAMPLERS
from opd.objective.gates import Arrays, Gate, GateView
from opd.objective.micro import autocast_head
from opd.recipe import Recipe, Rollouts, Stage, load_recipe, recipe_schema
from opd.registry import Choice, Family
from tests.support.helpers import refusals, term, tiny_model
from tests.support.rollouts import sampled_by, some_rollouts
from tests.support.steps import gradients

FAMILIES = {
    "form": Family("form", key="form"),
    "source": SOURCES,
    "sampler": SAMPLERS,
}  # whose choice is not named by `kind` alone

# Settings of every choice, away from its defaults
EXAMPLES: dict[str, dict[str, Any]] = {
    "form.direct": {"divergence": "jsd", "beta": 0.3, "support": "topk", "k": 7, "side": "union", "closure": "tail", "temperature": 2.0,
                    "correction": {"kind": "prefix", "high": 3.0}, "role": "other", "on": ["data"], "coefficient": {"value": 2, "until": 9},
                    "gate": ["correct", {"kind": "entropy", "share": 0.1}], "gated": "zero", "aggregate": "constant", "denominator": 5.0},
    "form.policy_gradient": {"divergence": "alpha", "alpha": 2.0, "surrogate": {"kind": "ppo", "dual": 3.0}, "correction": "tis",
                             "advantage": {"student": "proximal", "discount": 0.5, "whiten": True, "outcome_weight": 2.0, "std": True}},
    "form.k2": {"coefficient": 0.1, "correction": {"kind": "none", "veto": 0.1}},
    "form.cross_entropy": {"on": ["student"], "gate": "wrong"},
    "form.pairwise": {"preference": "ipo", "reference_weight": 0.5, "length_normalised": True, "pairs": "all", "role": "start",
                      "aggregate": "constant", "denominator": 3.0, "gate": "finished", "chosen": "teacher", "rejected": "student"},
    "preference.dpo": {"reference_weight": 0.2, "length_normalised": True}, "preference.ipo": {"reference_weight": 0.3}, "preference.orpo": {},
    "divergence.reverse_kl": {}, "divergence.forward_kl": {}, "divergence.jsd": {"beta": 0.2}, "divergence.skew_kl": {"alpha": 0.3, "adapt": True},
    "divergence.skew_reverse_kl": {"alpha": 0.4, "detached": True}, "divergence.alpha": {"alpha": -1.0}, "divergence.tvd": {}, "divergence.hellinger": {},
    "divergence.acceptance": {},
    "support.full": {}, "support.topk": {"k": 3, "side": "student", "closure": "renormalised", "with_sampled": True},
    "advantage.outcome": {"outcome_weight": 1.0, "baseline_of": "all", "overlong": "penalise", "overlong_buffer": 3, "baseline": "batch"},
    "advantage.teacher": {"teacher_weight": 0.5, "clip": 2.0, "extrapolation": 1.5, "shuffle": "rollout", "whiten": "group"}, "advantage.reference": {"reference_weight": 0.1},
    "advantage.fixed": {"value": -0.75, "entropy_weight": -0.5}, "gate.unlikely": {"share": 0.3, "per": "rollout"},
    "gate.trust": {"by": "entropy", "power": 2.0}, "gate.drift": {"gamma": 0.3, "most": 4.0}, "gate.length": {"shortest": 0.1, "longest": 0.2},
    "gate.tokens": {"ids": [3, 4], "occurrence": "first", "keep": True}, "gate.keep": {"share": 0.4, "minimum": 1, "prefer": "random", "threshold": 0.2},
    "advantage.probing": {"bonus": 0.2, "margin": 1.5}, "advantage.turns": {"turn_weight": 2.0, "turn_discount": 0.9, "turn_baseline": "group"},
    "form.candidates": {"k": 4, "weigh": "teacher", "low": 0.1, "high": 0.3, "gate": "finished"}, "form.hpd": {"draw": "argmax", "on": ["data"]},
    "advantage.ketchup": {"steps": 3, "whiten": False}, "surrogate.trrd": {"alpha": 0.3, "bound": 2.0, "high": 0.28},
    "advantage.magnitude": {"outcome_weight": 2.0, "share": 0.3, "band": 0.1, "warmup": 5, "decay": 9, "std": True},
    "advantage.gae": {"module": "critic", "gamma": 0.9, "lam": 0.95, "whiten": False, "reference_weight": 0.05},
    "form.value": {"module": "critic", "clip": None, "coefficient": 0.1, "gate": "finished"},
    "form.dskd": {"module": "maps", "divergence": "jsd", "beta": 0.3, "temperature": 1.0, "labels": "teacher", "masked": False},
    "form.representation": {"role": "other", "coefficient": 0.1},
    "module.projectors": {"role": "other", "align": "tokens", "start": "heads", "lr": 1e-3},
    "module.head": {"lr": 1e-3, "clip": None, "every": 2, "warmup": 3, "schedule": "cosine", "optimiser": {"kind": "muon", "momentum": 0.9}},
    "module.discriminator": {"model": "x", "revision": "1", "weights": "stage:warm-up#judge", "gradient_checkpointing": True, "weight_decay": 0.1},
    "module.reward_model": {"model": "x", "weights": "stage:rm#judge", "frozen": True, "gradient_checkpointing": True},
    "advantage.anchor_rank": {"n": 4, "rule": "worst", "floor": 0.1}, "gate.best_of_group": {},
    "advantage.score": {"module": "critic", "outcome_weight": 2.0, "baseline": "leave_one_out", "std": True},
    "optimiser.adamw": {}, "optimiser.adamw8bit": {},
    "optimiser.muon": {"momentum": 0.9, "nesterov": False, "ns_steps": 6, "adjust": "original"},
    "surrogate.importance_sampling": {"against": "proximal"}, "surrogate.ppo": {"low": 0.1, "high": 0.3, "dual": 4.0},
    "surrogate.cispo": {"high": 1.0}, "surrogate.shaped": {"gamma": 0.2}, "surrogate.gspo": {"low": 0.01, "against": "proximal"},
    "correction.icepop": {"low": 0.1, "high": 3.0, "veto": 0.01}, "correction.tis": {"level": "sequence", "high": 5.0},
    "correction.mis": {"level": "geometric", "low": 0.9, "high": 1.1}, "correction.prefix": {"high": 1.5}, "correction.none": {"veto": 0.2},
    "writer.student": {"share": 0.1}, "writer.mixed": {"share": 0.2}, "writer.teacher": {"share": 0.3}, "writer.data": {"share": 0.4}, "writer.oracle": {"share": 0.4}, "writer.rejected": {"samples": 1},
    "writer.replay": {"share": 0.2, "capacity": 9, "least": 3},
    "curriculum.pass_rate": {"a": 2.0, "b": 0.5, "least": 0.2},
    "curriculum.kl": {"share": 0.3, "prefer": "near", "least": 0.3},
    "curriculum.overlap": {"share": 0.3, "prefer": "near", "least": 0.3, "k": 8},
    "length_schedule.line": {"start": 9, "over": 7},
    "length_schedule.matched": {"start": 9, "below": 0.2, "steps": 3, "factor": 2.0},
    "share_schedule.line": {"to": {"data_share": 0.5}, "over": 9},
    "share_schedule.validation_loss": {"start": 0.2, "rise": 0.2, "margin": 0.3},
    "writer.shown": {"share": 0.5, "view": {"kind": "template", "template": "{answer}"}, "trained_as": "teacher"},
    "teacher.frozen": {"model": "x", "revision": "1", "role": "other", "domains": ["a"], "dtype": "bfloat16", "batch_tokens": 9,
                       "view": {"kind": "template", "template": "{answer}", "skip": 2}},
    "teacher.adapter": {"model": "x", "role": "other", "dtype": "bfloat16", "batch_tokens": 9},
    "teacher.served": {"address": "http://127.0.0.1:1", "model": "maths", "role": "other"},
    "teacher.cached": {"run": "runs/x", "stage": "score", "teacher": "maths", "model": "x", "role": "other"},
    "teacher.self": {"batch_tokens": 7, "role": "reference"}, "teacher.base": {"domains": ["b"]}, "teacher.ema": {"rate": 0.05, "temperature": 0.9},
    "teacher.refresh": {"every": 9, "force": True}, "teacher.live": {"force": True, "view": {"kind": "instruction", "instruction": "x"}},
    "teacher.mixture": {"parts": {"a": {"model": "x"}, "b": {"kind": "live"}}, "combine": "geometric", "role": "other",
                        "weights": {"a": 1.5, "b": {"value": 0.8, "to": 0.0, "over": 9, "curve": "cosine", "domains": {"maths": 0.2}}}},
    "teacher.extrapolation": {"toward": {"model": "x"}, "away": {"kind": "self"}, "by": {"value": 0.1, "distance": 15, "most": 5}, "divide": True},
    "view.bytes": {"skip": 3}, "form.uld": {"k": 9}, "form.gold": {"beta": 0.3, "matched_weight": 0.5, "unmatched_weight": 0.1},
    "teacher.vllm": {"address": "http://box:8000", "model": "m", "weights": "w", "dtype": "bfloat16", "transfer": "bfloat16", "tolerance": 0.1},
    "teacher.sglang": {"address": ["http://box:8000", "http://bay:8000"], "model": "m", "weights": "w", "dtype": "bfloat16", "token_env": "KEY"},
    "teacher.openai": {"address": "https://box", "model": "m", "tokenizer": "t", "max_logprobs": 64, "token_env": "KEY", "patience": 9.0},
    "view.same": {"skip": 3}, "view.instruction": {"instruction": "Be concise.", "place": "system"}, "view.template": {"template": "{prompt} {hint}"},
    "view.turns": {"hint": "{next}", "shortest": 3, "longest": 9},
    "view.context": {"document": "long", "instead": "short", "longest": 9, "keep": "both", "chat_template": "teacher"},
    "view.feedback": {"sibling": "{sibling}", "feedback": "{feedback}!", "feedback_beside_sibling": False, "closing": "", "longest": 5},
    "view.sibling": {"threshold": 0.5, "template": "{sibling}"}, "view.revision": {"wrong": "again", "correct": "so", "threshold": 0.5},
    "merge.average": {"models": ["a", "b"], "weights": [1.0, 2.0]}, "merge.stack": {"models": ["a"], "weights": [0.5]},
    "merge.task_arithmetic": {"base": "x", "models": ["a"], "weights": 0.3}, "merge.ties": {"base": "x", "models": ["a"], "density": 0.5},
    "select.flat": {"stage": "a", "gain": 0.1, "evaluations": 2}, "select.score": {"stage": "a", "least": 0.1, "most": 0.9},
    "shares.static": {}, "shares.tokens": {"least": 0.1}, "shares.length": {"power": -0.5}, "shares.gap": {"of": "score", "smoothing": 0.5},
    "stop_rule.patience": {"patience": 5}, "stop_rule.target": {"value": 0.5},
    "sampler.builtin": {"slots": 3, "dtype": "bfloat16", "compile": True},
    "sampler.vllm": {"python": "/opt/vllm/bin/python", "replicas": 2, "devices": ["0", "1"], "slots": 64, "cache": 4, "weights": "shared"},
    "source.task": {"source": "task:addition", "options": {"digits": 3}, "domain": "sums", "share": 2.0},
    "source.reasoning_gym": {"source": "chain_sum", "options": {"min_terms": 2}, "chat_template_kwargs": {"enable_thinking": False}},
    "source.episodes": {"source": "episodes:lake", "system": "Walk.", "domain": "lakes"},
    "source.run": {"source": "run:runs/x", "stage": "score", "share": 2.0}, "source.stage": {"source": "stage:score"},
    "source.file": {"source": "rows.jsonl", "columns": {"prompt": "question"}, "limit": 9, "eval_source": "held.csv"},
    "source.dataset": {"source": "owner/name", "split": "test", "limit": 5},
    "monitor.kl": {"fall": 9.0, "action": "stop"}, "monitor.diversity": {"fall": 0.5}, "monitor.stopping": {"longer": 3.0}, "monitor.shortening": {"share": 0.5}, "monitor.lengthening": {"longer": 3.0},
    "monitor.token": {"largest": 9.0}, "monitor.mismatch": {"log_ratio": 0.1}, "monitor.staleness": {"most": 2.0}, "monitor.calibration": {"window": 5},
    "monitor.together": {"evaluations": 2}, "monitor.saturation": {"errors": 2.0}, "monitor.conflict": {"cosine": -0.2}, "monitor.prefix": {"depth": 0.5}, "monitor.turns": {"rise_turns": 0.4},
    "gate.correct": {"threshold": 0.9}, "gate.wrong": {"threshold": 0.1}, "gate.all_wrong": {}, "gate.all_correct": {"threshold": 0.7},
    "gate.contrast": {}, "gate.finished": {}, "gate.entropy": {"share": 0.2}, "gate.soft_or": {"share": 0.3}, "gate.random": {"share": 0.9},
    "gate.teacher_entropy": {"above": 0.1, "below": 2.0}, "gate.selectkd": {"k": 9, "rejected": 0.1}, "gate.paced": {"a": 2.0, "b": 0.5},
    "reward.verifier": {"weight": 2.0}, "reward.exact": {"field": "solution", "extract": "boxed", "ignore": ["case"]},
    "reward.numeric": {"tolerance": 0.1, "absolute": 0.5, "time_limit": 3.0}, "reward.format": {"pattern": "a+", "whole": True},
    "reward.maths": {"field": "solution"}, "reward.code": {"partial": True, "memory": 64, "processes": 2, "disk": 1},
    "reward.json": {"json_schema": {"type": "object"}}, "reward.custom": {"function": "module:function", "fresh": False},
    "reward.chat": {"endpoint": {"address": "http://127.0.0.1:1/v1", "model": "m"}, "template": "{response}", "weight": 2.0},
    "reward.python callable": {"function": "brevity"},
    "environment.calculator": {"turns": 3, "tool_calls": "json"}, "environment.grid": {"progress": 0.5, "turn_tokens": 4},
    "environment.dialogue": {"workers": 2}, "environment.repair": {"sandbox": "none", "partial": True, "call_seconds": 9.0},
    "environment.search": {"corpus": "rows.jsonl", "results": 5, "result_characters": 100},
    "tracker.tensorboard": {}, "tracker.wandb": {}, "tracker.trackio": {},
    "gate.perplexity": {"of": "teacher", "power": -1.0}, "gate.turns": {"delta": 0.5},
    "environment.mcp": {"command": ["python", "server.py"], "variables": ["KEY"], "allow": ["add"], "tool_effects": "own", "turns": 3, "tool_calls": "xml"},
    "environment.gymnasium": {"package": "gem", "id": "game:GuessTheNumber-v0", "arguments": {"size": 3}, "action": "number", "workers": 2},
    "environment.textarena": {"id": "Wordle-v0", "arguments": {"size": 3}, "turn_tokens": 9, "call_seconds": 5.0},
    "environment.scienceworld": {"task": "boil", "simplifications": "", "steps": 9, "action": "text"},
    "environment.agent": {"command": ["python", "agent.py"], "variables": ["KEY"], "columns": ["answer"], "program_effects": "outside",
                          "repeats": "sample", "turns": 3, "call_seconds": 9.0, "workers": 2},
    "environment.verifiers": {"python": "python3", "settings": {"taskset": {"id": "sums"}}, "turns": 3, "call_seconds": 9.0},
    "environment.openenv": {"url": "http://127.0.0.1:8000", "action_key": "message", "observation_key": "said", "options": {"size": 3}},
}  # fmt: skip


def spelled_out(family: Family, name: str, settings: dict[str, Any]) -> Choice:
    return family.read({family.key: name, **settings})


@pytest.mark.parametrize("entry", registry.CHOICES)
def test_every_choice_reads_what_it_wrote(entry: str) -> None:
    family_name, name = entry.split(".")
    family = FAMILIES.get(family_name, Family(family_name))
    chosen = spelled_out(family, name, EXAMPLES[entry])
    assert (chosen.family, chosen.name) == (family_name, name)

    class Holder(BaseModel):  # a field typed by the base class
        one: Annotated[Choice, family]
        many: list[Annotated[Choice, family]] = Field(default_factory=list)

    holder = Holder(one=chosen, many=[chosen])
    for mode in ("json", "python"):
        written = holder.model_dump(mode=mode)
        assert set(EXAMPLES[entry]) <= set(written["one"])  # under the flat keys of a recipe
        assert Holder.model_validate(written) == holder
    assert Holder.model_validate_json(holder.model_dump_json(exclude_defaults=True)) == holder


OLD = {  # a term as earlier versions wrote it into resolved.yaml, whatever its form
    "form": "direct", "divergence": "reverse_kl", "beta": 0.5, "alpha": None, "support": "full", "k": 64, "side": "teacher", "closure": "tail",
    "temperature": 1.0, "role": "teacher", "on": None,
    "coefficient": {"value": 1.0, "to": None, "over": None, "until": None, "after": None},
    "advantage": {
        "teacher_weight": 1.0, "student": "behaviour", "clip": None, "extrapolation": 1.0, "kl_baseline": False, "discount": 0.0,
        "length_normalised": False, "future_only": False, "whiten": False, "outcome_weight": 0.0, "baseline": "group", "std": False,
        "overlong": "keep", "overlong_buffer": 16, "reference_weight": 0.0,
    },
    "surrogate": {"kind": "importance_sampling", "against": "behaviour", "low": 0.2, "high": 0.2, "dual": None},
    "correction": None, "gate": [], "gated": "drop", "aggregate": "token_mean", "denominator": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"divergence": "jsd", "beta": 0.1},
        {"divergence": "skew_kl"},
        {"divergence": "alpha", "alpha": 2.0},
        {"support": "topk", "k": 5},
        {"form": "policy_gradient"},
        {"form": "policy_gradient", "surrogate": OLD["surrogate"] | {"kind": "ppo", "low": 0.1}},  # type: ignore[operator]
        {"form": "policy_gradient", "correction": {"kind": "icepop", "level": "token", "low": 0.5, "high": 2.0, "veto": None}},
        {"form": "policy_gradient", "correction": {"kind": "tis", "level": "token", "low": 0.5, "high": 2.0, "veto": None}},
        {"form": "policy_gradient", "advantage": OLD["advantage"] | {"teacher_weight": 0.0, "outcome_weight": 1.0}},  # type: ignore[operator]
        {"form": "k2"},
        {"form": "cross_entropy"},
    ],
    ids=str,
)  # fmt: skip
def test_recipes_that_earlier_versions_wrote_are_read(changes: dict[str, Any]) -> None:
    found = term(**OLD | changes)
    short = {key: value for key, value in changes.items() if key not in ("surrogate", "correction", "advantage")}
    if not {"surrogate", "correction", "advantage"} & changes.keys():
        assert found == term(**short)
    assert term(**found.model_dump()) == found


def test_stages_that_earlier_versions_wrote_are_read() -> None:
    """Every key of a source, whatever it was; a sampler and a stop rule without a name."""
    prompt = {"domain": None, "share": 1.0, "split": "train", "eval_source": None, "limit": None, "columns": {}, "options": {},
              "chat_template_kwargs": {}}  # fmt: skip
    addresses = ["task:addition", "reasoning_gym:chain_sum", "/data/rows.jsonl", "owner/name"]
    stage = Stage.model_validate(
        {
            "student": "tiny/generalist",
            "prompts": [{"source": address} | prompt for address in addresses],
            "sampler": {"slots": None, "prefill_rows": None, "prefill_chunk": None, "dtype": None, "compile": False},
            "eval": {"early_stop": {"patience": 4}},
        }
    )
    assert [source.name for source in stage.prompts] == ["task", "reasoning_gym", "file", "dataset"]
    assert stage == Stage.model_validate(stage.model_dump(mode="json"))
    null = stage.model_dump() | {
        "sampler": {"engine": None, "compile": False},
        "eval": {"early_stop": {"kind": None, "patience": 4}},
    }
    assert stage == Stage.model_validate(null)
    assert (stage.sampler.name, stage.eval.early_stop) == (
        "builtin",
        spelled_out(Family("stop_rule"), "patience", {"patience": 4}),
    )


def test_a_key_of_another_choice_is_a_mistake() -> None:
    for wrong, words in (
        ({"beta": 0.3}, "beta belongs to divergence jsd, not to reverse_kl"),
        ({"k": 5}, "k belongs to support topk, not to full"),
        ({"form": "k2", "surrogate": "ppo"}, "surrogate belongs to form policy_gradient, not to k2"),
        ({"form": "policy_gradient", "surrogate": {"kind": "cispo", "dual": 3}}, "dual belongs to surrogate ppo"),
        ({"gate": {"kind": "teacher_entropy", "above": 2, "below": 1}}, "`above` (2) must be less than `below` (1)"),
        ({"gate": "entropi"}, "did you mean 'entropy'?"),
        ({"gate": {"kind": "entropy", "shar": 0.1}}, "did you mean 'share'?"),
        ({"coefficient": {"vaule": 1}}, "did you mean 'value'?"),
        ({"form": "policy_gradient", "advantage": {"clp": 1}}, "did you mean 'clip'?"),
        ({"divergence": "skew_kl", "alpha": 0.9999}, "less than or equal to 0.999"),
    ):
        with pytest.raises(ValidationError) as error:
            term(**wrong)
        assert words in str(error.value)


# Mistakes that the recipe alone can show


def recipe(**changes: Any) -> dict[str, Any]:
    base = {"student": "tiny/generalist", "teachers": "tiny/arithmetic", "prompts": "task:addition"}
    return base | changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective": {"gate": "turns"}}, ["gate turns", "one turn"]),
        (
            {"objective": {"gate": {"kind": "selectkd", "accept": "speculative"}}, "rollout": {"temperature": 0.7}},
            ["temperature 0.7", "greedy"],
        ),
        ({"objective": {"coefficient": 0}}, ["coefficient", "0 at every step", "Remove the term"]),
        ({"objective": {"coefficient": {"value": 0, "to": 0, "over": 5}}}, ["0 at every step"]),
        ({"objective": {"form": "policy_gradient"}, "rollout": {"data_share": 0.5}}, ["data_share 0.5", "no term"]),
        ({"objective": {"on": ["student"]}, "rollout": {"teacher_share": 0.5}}, ["teacher_share 0.5", "no term"]),
        (
            {"objective": {"divergence": "acceptance", "support": "topk", "k": 4, "closure": "generalised"}},
            ["f-divergences", "acceptance", "closure: tail"],
        ),
        ({"objective": {"form": "cross_entropy"}}, ["data and teacher tokens", "rollout.data_share"]),
        (
            {"objective": {"gate": {"kind": "perplexity"}}, "rollout": {"samples": 2, "data_share": 0.5}},
            ["gate perplexity", "data tokens", "on: [student]"],
        ),
        ({"teachers": None, "objective": {"form": "cross_entropy"}, "rollout": {"teacher_share": 0.5}}, ["no teacher"]),
        ({"objective": [{}, {"form": "policy_gradient"}], "rollout": {"top_p": 0.9}}, ["objective term 1", "top_p 0.9"]),
    ],
    ids=str,
)  # fmt: skip
def test_mistakes_are_found_when_the_recipe_is_read(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe(**changes))
    for word in words:
        assert word in str(error.value)


def test_coefficients_that_are_zero_for_a_while_are_no_mistake() -> None:
    for coefficient in ({"value": 0, "to": 1, "over": 5}, {"value": 1, "to": 0, "over": 5}, {"after": 50}):
        assert not refusals(Rollouts(), term(coefficient=coefficient), term())


# A choice of one's own


@pytest.fixture
def every_other() -> Iterator[type[Gate]]:
    @registry.register
    class EveryOther(Gate):
        """Every n-th token."""

        name: ClassVar[str] = "every_other"
        n: int = Field(2, ge=1, description="one token in n counts")

        def factors(self, view: GateView) -> Arrays:
            return [(np.arange(rollout.response_ids.size) % self.n == 0).astype(float) for rollout in view.rollouts]

    yield EveryOther
    del registry._registered["gate.every_other"]


def test_a_custom_choice_appears_next_to_built_in_ones(every_other: type[Gate]) -> None:
    found = load_recipe(recipe(objective={"gate": {"kind": "every_other", "n": 3}}))
    assert found.stages[0].objective[0].gate == [every_other(n=3)]  # type: ignore[call-arg]
    assert Recipe.model_validate(found.model_dump(mode="json")) == found
    assert "EveryOther" in recipe_schema()["$defs"]
    with pytest.raises(RecipeError, match="did you mean 'every_other'"):
        load_recipe(recipe(objective={"gate": "every_othr"}))
    with pytest.raises(RecipeError, match=r"gate\.n: "):
        load_recipe(recipe(objective={"gate": {"kind": "every_other", "n": 0}}))
    with pytest.raises(ValueError, match="exists already"):
        registry.register(type("Entropy", (Gate,), {"name": "entropy", "__module__": __name__}))
    student, teacher = tiny_model("llama"), tiny_model("llama", 1)
    rollouts = sampled_by(student, some_rollouts())
    _, _, statistics = gradients(student, {"t": teacher}, [term(gate="every_other")], rollouts)
    trained = np.concatenate([np.arange(item.response_ids.size) % 2 == 0 for item in rollouts])
    assert (~np.isnan(statistics[0].reverse_kl) == trained).all()


@pytest.fixture
def pearson() -> Iterator[type[CustomDivergence]]:
    @registry.register
    class Pearson(CustomDivergence):
        """scale * sum (S - T)^2 / T."""

        name: ClassVar[str] = "pearson"
        scale: float = Field(1.0, gt=0)

        def value(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
            return self.scale * ((2 * student - teacher).exp().sum(-1) - 1)

    yield Pearson
    del registry._registered["divergence.pearson"]


@pytest.mark.parametrize("support", [{}, {"support": "topk", "k": 5, "closure": "renormalised"}], ids=str)
def test_a_divergence_of_ones_own_needs_a_formula_only(
    pearson: type[CustomDivergence], support: dict[str, Any]
) -> None:
    objective = term(divergence="pearson", scale=0.5, **support)
    assert objective.divergence == pearson(scale=0.5)  # type: ignore[call-arg]
    student, teacher = tiny_model("llama"), tiny_model("llama", 1)
    rollouts = sampled_by(student, some_rollouts())
    loss, found, _ = gradients(student, {"t": teacher}, [objective], rollouts)
    assert loss > 0
    with pytest.MonkeyPatch.context() as patch:  # the same through autograd, with all logits held
        from opd.divergences import compute

        original = compute.divergence
        patch.setattr(compute, "divergence", lambda *given, **options: original(*given, **options, backend="reference"))
        expected, wanted, _ = gradients(student, {"t": teacher}, [objective], rollouts)
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, grad in found.items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-3, atol=1e-5 * float(wanted[name].abs().max()) + 1e-8)
    same, zero, _ = gradients(student, {"t": tiny_model("llama")}, [objective], rollouts)
    assert abs(same) < 1e-4
    assert max(float(grad.abs().max()) for grad in zero.values()) < 1e-3
    with pytest.raises(ValidationError, match="advantage of the sampled token"):
        term(form="policy_gradient", divergence="pearson")


def test_reading_recipes_needs_no_torch() -> None:
    code = (
        "import sys; from opd.recipe import load_recipe, recipe_schema, shipped_recipes\n"
        "for name in shipped_recipes(): load_recipe(name)\n"
        "recipe_schema(); sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# What a term reports and how it computes


def test_metrics_do_not_know_the_divergences_temperature() -> None:
    student, teacher = tiny_model("llama"), tiny_model("llama", 1)
    rollouts = sampled_by(student, some_rollouts())
    plain = gradients(student, {"t": teacher}, [term()], rollouts)[2][0]
    for temperature in (0.5, 4.0):
        warm = gradients(student, {"t": teacher}, [term(temperature=temperature)], rollouts)[2][0]
        for name in ("reverse_kl", "entropy"):
            np.testing.assert_allclose(getattr(warm, name), getattr(plain, name), rtol=1e-4, atol=1e-6)
        assert np.nanmax(warm.mismatch) < 1e-4


def test_under_autocast_heads_reach_the_kernels_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in fp32, and a last norm that gives fp32 back: hidden states and head still go in as bf16."""
    from opd.divergences import compute
    from opd.divergences.torch_backend import Job

    weight = torch.randn(11, 4, requires_grad=True)
    hidden = torch.randn(5, 4, requires_grad=True)
    assert autocast_head(Projection(hidden, weight)).hidden.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        routed = autocast_head(Projection(hidden, weight))
        assert (routed.hidden.dtype, routed.weight.dtype) == (torch.bfloat16, torch.bfloat16)
        with monkeypatch.context() as here:
            here.setenv("TRITON_INTERPRET", "1")  # else the device is the obstacle
            assert not any("differ" in obstacle for obstacle in compute.triton_obstacles(Job(None, 11), [routed]))
        loss = compute.divergence("reverse_kl", routed, routed.detach(), backend="chunked").loss
    assert loss.dtype == torch.float32
    assert routed.logits().dtype == torch.float32
    loss.backward()
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.float32, torch.float32)  # type: ignore[union-attr]

    seen: list[torch.dtype] = []
    original = compute.divergence

    def watched(kind: Any, student: Projection, teacher: Any, **options: Any) -> Any:
        seen.extend((student.hidden.dtype, student.weight.dtype, teacher.hidden.dtype, teacher.weight.dtype))
        return original(kind, student, teacher, **options)

    monkeypatch.setattr(compute, "divergence", watched)
    student, teacher = tiny_model("llama"), tiny_model("llama", 1)
    rollouts = sampled_by(student, some_rollouts())
    _, found, _ = gradients(student, {"t": teacher}, [term()], rollouts, autocast=True)
    assert set(seen) == {torch.bfloat16}
    assert {grad.dtype for grad in found.values()} == {torch.float32}
    _, exact, _ = gradients(student, {"t": teacher}, [term()], rollouts)
    head = "lm_head.weight"
    assert float((found[head] - exact[head]).norm() / exact[head].norm()) < 0.05


def test_a_stage_without_an_objective_is_direct() -> None:
    assert load_recipe(recipe()).stages[0].objective == [term()]
    assert isinstance(Stage.model_json_schema()["properties"]["objective"], dict)
