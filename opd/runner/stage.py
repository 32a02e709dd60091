"""One stage of a recipe: everything the step needs, put together and checked before the first token is sampled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from opd.config import Stage
from opd.config.stage import WEIGHTS
from opd.data.render import render_prompts, response_text
from opd.data.stream import PromptStream, Visit
from opd.errors import DataError, RecipeError, TrainingError
from opd.evaluation import Measures, evaluate
from opd.models import load_model
from opd.models.average import weight_average
from opd.models.language_model import LanguageModel
from opd.objective.objective import Objective
from opd.runner.checks import check_stage
from opd.runner.prompts import Looked, response_limit
from opd.sampling.graphs import Partner
from opd.sampling.plain import PlainSampler
from opd.sampling.writers import Desk
from opd.store import RolloutStore
from opd.teachers.kinds import ModelRef
from opd.teachers.pool import open_teachers
from opd.teachers.views import Group
from opd.text import inline_code, plain
from opd.trainer.trainer import Trainer
from opd.trainer.trajectories import Trajectories
from opd.types import Rollout, Sample, Sampling, TokenSampler

SIGN_OF_LIFE = 10.0  # seconds between two lines about reading prompts


class StageRun:
    """The live objects of a stage. `trainer.step` reads them; `runner.pipeline` drives them."""

    def __init__(self, spec: Stage, store: RolloutStore, resolve_model: Callable[[str], str], *,
                 check_stop: Callable[[], None], on_phase: Callable[[str], None], on_token: Callable[[], None],
                 on_rollouts: Callable[[Sequence[Rollout], Mapping[str, float | None]], None] = lambda rollouts, rewards: None,
                 say: Callable[[str], None] = lambda line: None) -> None:  # fmt: skip
        self.spec, self.store, self.check_stop, self.on_phase, self.say = spec, store, check_stop, on_phase, say
        self.on_rollouts = on_rollouts
        self._warned = False  # of prompts that are skipped
        self._said = time.monotonic()  # when reading them was last told
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        torch.manual_seed(spec.seed)
        checked = check_stage(spec, resolve_model, self._told, say)
        on_phase("loading")
        self.device, self.sources, self.domains = checked.device, checked.sources, checked.domains
        self.routes, self.rewarder = checked.routes, checked.rewarder
        self._unrewarded = 0  # steps in a row
        self.stream = PromptStream(self.sources, [source.share for source in spec.prompts], spec.seed)
        device, student = str(self.device), spec.student
        own = WEIGHTS[spec.train.precision_on(device)]
        self.student = load_model(resolve_model(student.model), dtype=own, revision=student.revision, lora=student.lora,
                                  gradient_checkpointing=student.gradient_checkpointing, device=device)  # fmt: skip

        def load(ref: ModelRef) -> LanguageModel:
            return load_model(resolve_model(ref.model), dtype=ref.dtype or own, revision=ref.revision, device=device)

        self.teachers, self.stop_ids = open_teachers(spec.teachers, self.student, load)
        if not self.stop_ids:
            raise RecipeError(
                f"student {student.model!r} and its teachers name no stop id. Set eos_token_id in a generation_config.json."
            )
        self._build(checked.inputs, on_token)

    def _told(self, name: str, done: int, total: int) -> None:
        line = f"reading {plain(name)}: {done:,} of {total:,} rows"
        self.on_phase(line)
        if time.monotonic() - self._said > SIGN_OF_LIFE:
            self._said = time.monotonic()
            self.say(f"{self.spec.name}: {line}")
        self.check_stop()

    def _fits(self, visit: Visit) -> bool:
        """Of prompts that nobody could look at before. Nothing that a user can mend, so it never stops a run."""
        kwargs = self.spec.prompts[visit.source].chat_template_kwargs
        (ids,) = render_prompts([visit.prompt], self.student.tokenizer, kwargs)
        reason = str(ids) if isinstance(ids, DataError) else f"prompt {visit.prompt.id!r} has {ids.size:,} tokens"
        fits = not isinstance(ids, DataError) and ids.size <= self._room
        if not fits and not self._warned:
            self._warned = True
            self.say(
                f"{self.spec.name}: {plain(reason)}, and the sampler has room for {self._room:,}: prompts like this are skipped and "
                "counted. rollout.max_prompt_tokens makes more room in a new run"
            )
        return fits

    def _build(self, inputs: Looked, on_token: Callable[[], None]) -> None:
        """Everything that depends on how long prompts are: sampler slots, trajectories, held-out questions."""
        spec = self.spec
        tokenizer = self.student.tokenizer
        for note in inputs.notes:
            self.say(f"{spec.name}: {note}")
        self.questions, self._room = inputs.questions, inputs.room
        self.stream.leave_out(inputs.scanned.unusable, self._fits if inputs.scanned.open_ended else None)
        self.max_length = inputs.room + response_limit(spec)
        dtype = getattr(torch, spec.sampler.dtype) if spec.sampler.dtype else None
        self.engine: TokenSampler = spec.sampler.open(
            self.student.inference_copy(dtype), self.max_length, merge_stop=self.stop_ids
        )
        if spec.rollout.teacher_mix:
            mixed = set(self.routes.get("teacher", {}).values())
            spec.sampler.require_mixing([self.student, *(self.teachers[name].model for name in mixed)], self.max_length)
        for line in self._slower():
            self.say(f"{spec.name}: {line}")
        self.objective = Objective(spec.objective, self.teachers, spec.rollout, self.stop_ids, spec.train, spec.seed)
        self.trainer = Trainer(
            self.student,
            self.objective,
            spec.train,
            seed=spec.seed,
            teacher_of=self.routes.get("teacher", {}),
            check_stop=self.check_stop,
        )
        self.optimiser = self.trainer.optimiser
        self.version = 0
        rollout = spec.rollout
        self.sampling = Sampling(
            rollout.max_new_tokens,
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            self.stop_ids,
            tuple(rollout.stop),
        )
        self._teacher_engines: dict[str, TokenSampler] = {}
        self._mixed_engines: dict[str, TokenSampler] = {}
        desk = Desk(
            tokenizer, rollout.max_new_tokens, self.stop_ids, self.routes.get("teacher", {}), self.engine, self.teacher_engine,
            self.mixed_engine, lambda visit: spec.prompts[visit.source].chat_template_kwargs,
        )  # fmt: skip
        self.trajectories = Trajectories(
            stage=spec.name, seed=spec.seed, spec=rollout, sources=spec.prompts, tokenizer=tokenizer, sampling=self.sampling,
            store=self.store, desk=desk, max_prompt_tokens=inputs.room, exact=spec.checkpoint.resume == "exact", check_stop=self.check_stop,
            on_token=on_token,
        )  # fmt: skip
        self.publish(version=0)

    def _slower(self) -> list[str]:
        """Models that do not run packed, or not in slots, and why: said once."""
        teachers = (teacher.model for teacher in self.teachers.values() if teacher.model is not None)
        models: tuple[LanguageModel, ...] = (self.student, *teachers)
        found = {
            f"{model.name}: sequences go through it {model.route.name}, which is slower than packed: {model.route.why}"
            for model in models
            if model.route.why
        }
        if isinstance(self.engine, PlainSampler):
            found.add(f"{self.student.name} {self.engine.manner}")
        return sorted(found)

    def teacher_engine(self, name: str) -> TokenSampler:
        if name not in self._teacher_engines:
            self._teacher_engines[name] = self._engine(self.teachers[name].model)
        return self._teacher_engines[name]

    def mixed_engine(self, name: str) -> TokenSampler:
        """The student with a teacher reading along, for `rollout.teacher_mix`."""
        if name not in self._mixed_engines:
            engine = self._engine(self.student, Partner(self.teachers[name].model, self.spec.rollout.teacher_mix))
            engine.load(self.student.weights(self.version))
            self._mixed_engines[name] = engine
        return self._mixed_engines[name]

    def _engine(self, model: LanguageModel, partner: Partner | None = None) -> TokenSampler:
        dtype = getattr(torch, self.spec.sampler.dtype) if partner is not None and self.spec.sampler.dtype else None
        return self.spec.sampler.open(
            model.inference_copy(dtype), self.max_length, merge_stop=self.stop_ids, partner=partner
        )

    def publish(self, version: int | None = None, step: int | None = None) -> None:
        """The sampler gets the weights as they are now; after a step, teachers that follow the student see them, too."""
        self.version = self.version + 1 if version is None else version
        weights = self.student.weights(self.version)
        for engine in (self.engine, *self._mixed_engines.values()):
            engine.load(weights)
        if step is not None:
            for teacher in self.teachers.values():
                teacher.observe(step, weights)

    def group(self, visit: Visit, rollouts: Sequence[Rollout], rewards: Mapping[str, float | None]) -> Group:
        """The rollouts of one visit, as a teacher's view sees them."""
        kwargs = self.spec.prompts[visit.source].chat_template_kwargs
        return Group(rollouts, self.student.tokenizer, rewards, kwargs, self.stop_ids)

    def reward(self, rollouts: Sequence[Rollout], visits: Sequence[Visit]) -> dict[str, float | None]:
        """Rewards of rollouts whose prompt has any to give. None: it could not be given, which is not 0."""
        every, known = rollouts, self._rewarded_before(rollouts)
        rollouts = [rollout for rollout in rollouts if rollout.id not in known]
        prompts = {visit.prompt.id: visit.prompt for visit in visits}
        asked = [rollout for rollout in rollouts if self.rewarder.covers(prompts[rollout.prompt_id])]
        samples = [Sample(prompts[rollout.prompt_id], self.text(rollout), rollout) for rollout in asked]
        for rollout, result in zip(asked, self.rewarder(samples), strict=True):
            known[rollout.id] = result.reward
            self.store.note(rollout.id, reward=result.reward)
        return {rollout.id: known[rollout.id] for rollout in every if rollout.id in known}

    def require_rewarded(self, step: int, rewards: Mapping[str, float | None]) -> None:
        """An objective that lives on rewards learns nothing without any: stop, and say why."""
        used = any(term.needs().rewards for term in self.spec.objective)
        self._unrewarded = self._unrewarded + 1 if used and all(reward is None for reward in rewards.values()) else 0
        if self._unrewarded >= self.spec.rewards.stop_after:
            raise TrainingError(
                f"step {step}: nothing was rewarded for {self._unrewarded} steps. The last reason: {self.rewarder.last_failure}. "
                "log.txt has the first failures of each reward; mend the reward, or raise rewards.stop_after."
            )

    def _rewarded_before(self, rollouts: Sequence[Rollout]) -> dict[str, float | None]:
        """Rewards that an earlier process of this run left in the store."""
        if not self.trajectories.taken_up:
            return {}
        notes = {rollout.id: self.store.entries[rollout.id].notes for rollout in rollouts}
        return {key: found["reward"] for key, found in notes.items() if "reward" in found}

    def text(self, rollout: Rollout) -> str:
        return response_text(rollout.response_ids, self.student.tokenizer, self.stop_ids)

    # Evaluation

    def evaluate(self, engine: TokenSampler, domains: Sequence[str] | None = None) -> dict[str, Measures]:
        spec = self.spec.eval
        questions = {domain: asked for domain, asked in self.questions.items() if domains is None or domain in domains}
        if not questions:
            return {}
        limit = spec.max_new_tokens or self.spec.rollout.max_new_tokens
        sampling = Sampling(limit, stop_ids=self.stop_ids, stop_strings=tuple(self.spec.rollout.stop))
        return evaluate(engine, questions, sampling, self.student.tokenizer, greedy=spec.greedy, k=spec.k,
                        temperature=spec.temperature, seed=self.spec.seed, check_stop=self.check_stop, reward=self.rewarder)  # fmt: skip

    def evaluate_teachers(self) -> dict[str, dict[str, Measures]]:
        """Every teacher of the role `teacher` with a model of its own, on every domain: its own, and what it has forgotten."""
        return {
            name: self.evaluate(self._engine(self.teachers[name].model))
            for name in dict.fromkeys(self.routes.get("teacher", {}).values())
            if self.spec.teachers[name].has_model and not self.spec.teachers[name].of_student
        }

    def evaluate_weight_average(self) -> dict[str, Measures]:
        names = list(dict.fromkeys(self.routes.get("teacher", {}).values()))
        return self.evaluate(self._engine(weight_average([self.teachers[name].model for name in names])))


def model_card(spec: Stage, step: int, metrics: Mapping[str, Any]) -> str:
    """README.md of a saved model: where it came from, in the hub's format."""
    teachers = "\n".join(f"- {inline_code(name)}: {inline_code(kind.title)}" for name, kind in spec.teachers.items())
    terms = "\n".join(f"- {inline_code(term.model_dump_json(exclude_defaults=True))}" for term in spec.objective)
    divergence = metrics.get("reverse_kl")
    known = (
        f"Reverse KL to the teachers at this step: {divergence:.4f} nats per token.\n" if divergence is not None else ""
    )
    return (
        f"---\nlibrary_name: transformers\ntags: [on-policy-distillation, opd]\n---\n"
        f"# {inline_code(spec.name)}, step {step}\n\nTrained with opd from {inline_code(spec.student.model)}.\n\n"
        f"Teachers:\n{teachers or '- none'}\n\nObjective:\n{terms}\n\n{known}"
    )


def checkpoint_directory(root: Path, stage: str, step: int) -> Path:
    return root / "checkpoints" / stage / f"step-{step:06d}"
