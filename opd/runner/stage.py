"""One stage of a recipe: everything the step needs, put together and checked before the first token is sampled."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from opd.config import Stage
from opd.data.render import render_prompts, response_text
from opd.data.shares import DomainSeen
from opd.data.stream import PromptStream, Visit
from opd.errors import DataError, RecipeError, TrainingError
from opd.models.identity import weights_hash
from opd.models.tokenizers import fingerprint
from opd.objective.objective import Objective
from opd.objective.trace import Trace
from opd.runner.checks import RevisionOf, as_named, check_stage
from opd.runner.plan import settle_sizes
from opd.runner.prompts import Looked, response_limit
from opd.runner.shown import shown_room
from opd.runner.sizes import told_of_memory
from opd.runner.stage_models import StageModels, slower_models
from opd.runner.stage_samplers import StageSamplers
from opd.sampling.replay import RunSource
from opd.sampling.writers import Desk
from opd.store import RolloutStore
from opd.store.calls import StoredCalls
from opd.teachers.blending import models_of
from opd.teachers.cache import FOLDER, ScoredStage, scored_by
from opd.teachers.kinds import ModelRef, Surroundings
from opd.teachers.pool import open_teachers
from opd.teachers.router import chooser
from opd.teachers.views import Group
from opd.text import plain
from opd.trainer import interpreters
from opd.trainer.ahead import Ahead
from opd.trainer.demonstrate import Demonstrator
from opd.trainer.trainer import Trainer
from opd.trainer.trajectories import Trajectories
from opd.trainer.world import World
from opd.types import Prompt, Rollout, Sample, Sampling

UNSHOWN = 8  # steps without anything to show before it is said; then at every doubling
SIGN_OF_LIFE = 10.0  # seconds between two lines about reading prompts


class StageRun:
    """The live objects of a stage. `trainer.step` reads them; `runner.pipeline` drives them."""

    def __init__(
        self,
        spec: Stage,
        store: RolloutStore,
        resolve_model: Callable[[str], str],
        *,
        revision_of: RevisionOf = as_named,
        check_stop: Callable[[], None],
        on_phase: Callable[[str], None],
        on_token: Callable[[], None],
        on_rollouts: Callable[[Sequence[Rollout], Mapping[str, float | None]], None] = lambda rollouts, rewards: None,
        say: Callable[[str], None] = lambda line: None,
        world: World | None = None,
    ) -> None:
        interpreters.begin_for(spec)
        self.world = world or World()
        self.ahead = Ahead(spec, check_stop) if spec.rollout.staleness else None
        check_stop = check_stop if self.ahead is None else self.ahead.check_stop
        self.spec, self.store, self.check_stop, self.on_phase, self.say = spec, store, check_stop, on_phase, say
        self.on_rollouts = on_rollouts
        self.rewarding = threading.Lock()  # evaluation, and batches that are rewarded ahead of their step
        self.traces: dict[str, Trace] = {}  # of the newest step, by rollout id
        self.answered: list[dict[str, Any]] = []  # a few answers to held-out questions, not written down yet
        self._warned = False  # of prompts that are skipped
        self._said = time.monotonic()  # when reading them was last told
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        elif self.ahead is not None:  # sampling and training have half of them each
            torch.set_num_threads(min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) // 2)))
        torch.manual_seed(spec.seed)
        checked = check_stage(spec, resolve_model, self._told, say, revision_of)
        on_phase("loading")
        spec = self.spec = settle_sizes(spec, store.directory.parent, checked, resolve_model, self.world)
        self.device, self.sources, self.domains = checked.device, checked.sources, checked.domains
        self.device = self.world.device(self.device, spec.device)
        self.routes, self.rewarder = checked.routes, checked.rewarder
        self.teacher_of = checked.teacher_of  # domain -> teacher, for reports
        self.teacher_for = chooser(self.routes.get("teacher", {}), spec.route)
        self._unrewarded = 0  # steps in a row
        self._unshown: Counter[str] = Counter()  # steps in a row in which a teacher's view showed nothing
        self._templates = checked.templates
        self.stream = PromptStream(self.sources, [source.share for source in spec.prompts], spec.seed)
        self.stream.steer(spec.shares)
        models = StageModels(spec, self.device, resolve_model, revision_of, store.directory.parent, self.world)
        self.pager = models.pager
        self.student = models.student(spec, sharded=self.world.sharded)
        around = Surroundings(say, check_stop, store.directory.parent, self.world.sharded)
        self.teachers, self.stop_ids = open_teachers(spec.teachers, self.student, models.teacher, around)
        if self.pager is not None:
            say(f"{spec.name}: {spec.pool.describe(self.pager.sizes, str(self.device))}")
        if not self.stop_ids:
            raise RecipeError(
                f"student {spec.student.model!r} and its teachers name no stop id. Set eos_token_id in a generation_config.json."
            )
        self.scored = None if spec.train.learn else self._begin_scores(resolve_model, revision_of)
        self._build(checked.inputs, on_token, revision_of(spec.student.model, spec.student.revision))

    def _begin_scores(self, resolve_model: Callable[[str], str], revision_of: RevisionOf) -> ScoredStage:
        """Whose scores this stage keeps, for teachers of kind cached."""
        spec, own = self.spec, ModelRef(self.spec.student.model, self.spec.student.revision)
        weights = {
            name: {
                ref.identified(ref.model): ref.identified(
                    weights_hash(resolve_model(ref.model), revision_of(ref.model, ref.revision))
                )
                for ref in (*kind.scored_with(), *((own,) if kind.of_student else ()))
            }
            for name, kind in spec.teachers.items()
        }
        scored = ScoredStage(
            self.store.directory.parent / FOLDER / f"{spec.name}.json",
            fingerprint(self.student.tokenizer),
            self.stop_ids,
            self.student.size,
            {name: scored_by(kind, self.teachers[name], weights[name]) for name, kind in spec.teachers.items()},
        )
        scored.begin()
        return scored

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
        fits = not isinstance(ids, DataError) and ids.size <= self.room
        if not isinstance(ids, DataError) and fits and self.ahead is None:  # which has a tokenizer of its own
            self.trajectories.looked_at[visit.prompt.id] = ids
        if not fits and not self._warned:
            self._warned = True
            self.say(
                f"{self.spec.name}: {plain(reason)}, and the sampler has room for {self.room:,}: prompts like this are skipped and "
                "counted. rollout.max_prompt_tokens makes more room in a new run"
            )
        return fits

    def _build(self, inputs: Looked, on_token: Callable[[], None], revision: str | None) -> None:
        """Everything that depends on how long prompts are: sampler slots, trajectories, held-out questions."""
        spec = self.spec
        for note in (*inputs.notes, *spec.sampler.notes()):
            self.say(f"{spec.name}: {note}")
        self.questions, self.room = inputs.questions, inputs.room
        self.stream.leave_out(inputs.scanned.unusable, self._fits if inputs.scanned.open_ended else None)
        shown = shown_room(spec, self.sources, self.student.tokenizer, self.student.context)
        max_length = max(inputs.room + response_limit(spec), shown)
        around = (self.world, self.check_stop, revision, self.say, self.store)
        self.samplers = StageSamplers(spec, self.student, self.teachers, max_length, self.stop_ids, *around)
        self.engine = self.samplers.student
        if spec.rollout.teacher_mix:
            mixed = [self.teachers[name].model for name in set(self.routes["teacher"].values())]
            self.student.inside(partial(spec.sampler.require_mixing, [self.student, *mixed], max_length))
            if self.world.sharded:  # copies of the student are made while it is whole
                for name in dict.fromkeys(self.routes["teacher"].values()):
                    self.samplers.mixed(name)
        for line in slower_models(self.student, self.teachers.values(), self.samplers.manner):
            self.say(f"{spec.name}: {line}")
        self.student = self.world.shard(self.student, spec.cluster)
        self.objective = Objective(spec.objective, self.teachers, spec.rollout, self.stop_ids, spec.seed)
        told = partial(told_of_memory, self.store.directory.parent, spec.name, self.say)
        self.trainer = Trainer(
            self.student,
            self.objective,
            spec.train,
            seed=spec.seed,
            check_stop=self.check_stop,
            world=self.world,
            told=told,
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
        self.trajectories = self._trajectories(inputs.room, max_length, on_token)
        calls, wanted = StoredCalls(self.store, spec.name), spec.rollout.demonstrations
        self.rewarder.remember(calls, self.check_stop)
        special = self.student.tokenizer.all_special_tokens
        self.demonstrator = None if wanted is None else Demonstrator(wanted, calls, special, self.check_stop, self.say)
        self.publish(version=0)

    def _trajectories(self, room: int, max_length: int, on_token: Callable[[], None]) -> Trajectories:
        """Who writes the answers, and how they come into the store."""
        spec, rollout, tokenizer = self.spec, self.spec.rollout, self.student.tokenizer
        desk = Desk(
            tokenizer,
            rollout.max_new_tokens,
            self.stop_ids,
            self.teacher_for,
            student=self.engine,
            teacher=self.samplers.teacher,
            mixed=self.samplers.mixed,
            template_kwargs=lambda visit: spec.prompts[visit.source].chat_template_kwargs,
        )
        return Trajectories(
            stage=spec.name,
            seed=spec.seed,
            spec=rollout,
            sources=spec.prompts,
            tokenizer=tokenizer,
            sampling=self.sampling,
            store=self.store,
            desk=desk,
            max_prompt_tokens=room,
            max_length=max_length,
            replays={number: source for number, source in enumerate(self.sources) if isinstance(source, RunSource)},
            exact=spec.checkpoint.resume == "exact",
            check_stop=self.check_stop,
            on_token=on_token,
            world=self.world,
        )

    @property
    def place(self) -> str:
        """Where it works, in words."""
        return f"{self.device}{self.world.title}"

    def publish(self, version: int | None = None, step: int | None = None) -> None:
        """The sampler gets the weights as they are now; after a step, teachers that follow the student see them, too."""
        self.version = self.version + 1 if version is None else version
        weights = self.samplers.weights_of(self.student, self.version)
        self.samplers.load(weights)
        if self.ahead is not None and step is not None:
            self.ahead.trained(step)
        if step is not None:
            for teacher in self.teachers.values():
                teacher.observe(step, weights)

    def scoring(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """While teachers score, in this order: those that wait outside are brought in time."""
        if self.pager is None:
            return nullcontext()
        return self.pager.scoring([model for name in names for model in models_of(self.teachers[name])])

    def page_metrics(self) -> dict[str, float]:
        """What teachers that come and go cost this step, which is over: their heads are not needed any more."""
        if self.pager is None:
            return {}
        self.pager.release()
        return self.pager.metrics()

    def group(self, visit: Visit, rollouts: Sequence[Rollout], rewards: Mapping[str, float | None]) -> Group:
        """The rollouts of one visit, as a teacher's view sees them."""
        kwargs = self.spec.prompts[visit.source].chat_template_kwargs
        feedback = self.world.share(partial(self._feedback, rollouts)) if self._keeps_feedback else {}
        return Group(rollouts, self.student.tokenizer, rewards, kwargs, self.stop_ids, feedback)

    def _feedback(self, rollouts: Sequence[Rollout]) -> dict[str, str]:
        """What came with their rewards, from the store."""
        return {rollout.id: self.store.entries[rollout.id].notes.get("feedback", "") for rollout in rollouts}

    def divide_prompts(self, gaps: Mapping[str, float]) -> None:
        """Before a step: shares of the domains, where they follow a need. `gaps`: how far behind its teacher each scores."""
        if (keeper := self.stream.keeper) is not None:
            self.stream.reshare(self.world.share(lambda: keeper.shares(gaps)))

    def note_needs(self, rollouts: Sequence[Rollout], metrics: Mapping[str, float | None]) -> dict[str, float]:
        """After a step: what it showed of the domains. Returns the shares that it had."""
        if (keeper := self.stream.keeper) is None:
            return {}
        sizes: dict[str, list[int]] = {}
        for rollout in rollouts:
            sizes.setdefault(rollout.domain, []).append(int(rollout.response_ids.size))
        keeper.observe(
            {name: DomainSeen(len(size), sum(size), metrics.get(f"kl/{name}")) for name, size in sizes.items()}
        )
        return {f"share/{domain}": share for domain, share in self.stream.shares.items()}

    def context_of(self, by: Literal["teacher", "student"], prompt: Prompt) -> int:
        """Tokens that whoever writes something about a prompt can read."""
        return self.student.context if by == "student" else self.teachers[self.teacher_for(prompt)].context

    def groups_for(self, teacher: str, groups: Mapping[str, Group]) -> Mapping[str, Group]:
        """With the tokenizer whose chat template the teacher's view uses."""
        tokenizer = self._templates[teacher]
        if self.spec.teachers[teacher].view.chat_template == "student":
            return groups
        return {name: replace(group, tokenizer=tokenizer, student=group.tokenizer) for name, group in groups.items()}

    def tell_unshown(self, step: int, shares: Mapping[str, float]) -> None:
        """A view that shows nothing, step after step, teaches nothing: said once it has gone on for a while, and again later."""
        for name in self.teachers:
            share = shares.get(f"unshown/{name}")
            if share is None:  # it was not asked, or shows what the student reads
                continue
            steps = self._unshown[name] = self._unshown[name] + 1 if share == 1 else 0
            if steps >= UNSHOWN and steps & (steps - 1) == 0:
                self.say(
                    f"{self.spec.name}: WARNING: step {step}: the view of teachers.{name} has shown nothing for {steps} steps, so nothing "
                    "is learnt from it. Look at what it needs: columns, right answers in a group, feedback, the teacher's context"
                )

    @property
    def _keeps_feedback(self) -> bool:
        rescue = self.spec.rollout.rescue
        views = [*(kind.view for kind in self.spec.teachers.values()), *([rescue.view] if rescue is not None else [])]
        return any(view.reads_feedback for view in views)

    def reward(self, rollouts: Sequence[Rollout], visits: Sequence[Visit], taken_up: bool) -> dict[str, float | None]:
        """Rewards of rollouts whose prompt has any to give. None: it could not be given, which is not 0.

        `taken_up`: an earlier process may have rewarded some of them.
        """
        every, known = rollouts, self._rewarded_before(rollouts) if taken_up else {}
        rollouts = [rollout for rollout in rollouts if rollout.id not in known]
        prompts = {visit.prompt.id: visit.prompt for visit in visits}
        asked = [rollout for rollout in rollouts if self.rewarder.covers(prompts[rollout.prompt_id])]
        samples = [Sample(prompts[rollout.prompt_id], self.text(rollout), rollout) for rollout in asked]
        for rollout, result in zip(asked, self.rewarder(samples), strict=True):
            known[rollout.id] = result.reward
            said = {"feedback": result.feedback} if self._keeps_feedback and result.feedback else {}
            self.store.note(rollout.id, reward=result.reward, **said)
        return {rollout.id: known[rollout.id] for rollout in every if rollout.id in known}

    def demonstrate(
        self, rollouts: list[Rollout], rewards: dict[str, float | None], visits: Sequence[Visit]
    ) -> list[Rollout]:
        """The same, with demonstrations in place of answers that failed; `rewards` gets what those are worth."""
        if self.demonstrator is None:
            return rollouts
        asked = {visit.prompt.id: visit for visit in visits}
        prompts = {name: visit.prompt for name, visit in asked.items()}
        texts = self.demonstrator.texts(rollouts, prompts, rewards, self.text)
        names = {
            rollout.id: self.trajectories.demonstrate(
                rollout, asked[rollout.prompt_id], self.demonstrator.source, texts[rollout.id], self.version
            )
            for rollout in rollouts
            if rollout.id in texts
        }
        for name in names:
            self.store.note(name, replaced=True)
        self.store.commit(sync=True)
        made = dict(zip(names, self.store.load(names.values()), strict=True))
        rewards |= self.reward(list(made.values()), visits, self.trajectories.taken_up)
        return [made.get(rollout.id, rollout) for rollout in rollouts]

    def require_rewarded(self, step: int, rewards: Mapping[str, float | None]) -> None:
        """Where terms or views live on rewards, nothing is learnt without any: stop, and say why."""
        none = self.spec.uses_rewards and all(reward is None for reward in rewards.values())
        self._unrewarded = self._unrewarded + 1 if none else 0
        if self._unrewarded >= self.spec.rewards.stop_after:
            raise TrainingError(
                f"step {step}: nothing was rewarded for {self._unrewarded} steps. The last reason: {self.rewarder.last_failure}. "
                "log.txt has the first failures of each reward; mend the reward, or raise rewards.stop_after."
            )

    def _rewarded_before(self, rollouts: Sequence[Rollout]) -> dict[str, float | None]:
        """Rewards that an earlier process of this run left in the store."""
        notes = {rollout.id: self.store.entries[rollout.id].notes for rollout in rollouts}
        return {key: found["reward"] for key, found in notes.items() if "reward" in found}

    def close(self) -> None:
        """What runs beside this process or its first thread, or is connected to another."""
        if self.ahead is not None:
            self.ahead.close()
        self.rewarder.close()
        self.samplers.close()
        if self.demonstrator is not None:
            self.demonstrator.close()
        if self.pager is not None:
            self.pager.close()

    def text(self, rollout: Rollout) -> str:
        return response_text(rollout.response_ids, self.student.tokenizer, self.stop_ids)
