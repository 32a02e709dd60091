"""Teachers score a batch. Each teacher works once per step, and its signals are written to the store.

An interrupted run finds the signals in the store and does not ask again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from opd.common.context import RunContext
from opd.loop.ranks import Ranks
from opd.objective.batch import Batch
from opd.objective.objective import Objective
from opd.objective.term import scored_domains
from opd.recipe import Stage
from opd.records import Prompt, Rendered, Rollout, Signal, SignalKind, SignalNeed, TeacherLike
from opd.rollouts.episodes import TURN_OF
from opd.store import RolloutStore
from opd.teachers.cached import ScoredStage, keep_scores, text_key
from opd.teachers.kinds import chooser
from opd.teachers.mixture import models_of
from opd.teachers.paging import Pager
from opd.teachers.scoring import ScoringTeacher
from opd.teachers.views import Group, View, texts_for

INNER = ("hidden", "layers")  # signals that stay on the rank that uses them
UNSHOWN = 8  # steps in a row with nothing to show before a warning, which is repeated at every doubling


@dataclass
class Scorer:
    """Asks the teacher of each rollout for the signals that the objective needs from its role."""

    spec: Stage
    teachers: Mapping[str, TeacherLike]
    routes: Mapping[str, Mapping[str, str]]  # role -> value of the route's column -> teacher
    templates: Mapping[str, Any]  # teacher -> the tokenizer whose chat template its view uses
    objective: Objective
    store: RolloutStore
    ranks: Ranks
    context: RunContext
    pager: Pager | None = None  # set if some teachers are paged out of memory
    kept: ScoredStage | None = None  # set if scores are kept for teachers of kind cached
    _unshown: Counter[str] = field(default_factory=Counter)  # steps in a row in which a view showed nothing

    def __post_init__(self) -> None:
        self._choose = {role: chooser(table, self.spec.route) for role, table in self.routes.items()}
        self.teacher_for = self._choose.get("teacher", chooser({}, self.spec.route))
        self._domains = {role: scored_domains(self.spec.objective, role) for role in self.routes}
        self.partial = any(domains is not None for domains in self._domains.values())  # some rollouts are not scored
        self._keeps_hidden = self.spec.keeps_hidden
        self._models = {name: tuple(teacher.reads()) or name for name, teacher in self.spec.teachers.items()}

    def score(self, batch: Batch, step: int) -> None:
        """Fill in the batch's signals. Each teacher works once, one after the other.

        Metrics get the share of rollouts that a view had nothing to show for or that its teacher could not read, and the share of tokens
        at which a teacher with another tokenizer was not compared.
        """
        needs = self.objective.needs(step, self.spec.train.updates)
        signals: dict[tuple[str, SignalKind], dict[str, Signal]] = {need: {} for need in needs}
        mine = {rollout.id for rollout in self.ranks.deal(batch.rollouts)}
        asked = self._by_model(batch, [role for role, _ in needs])
        metrics: dict[str, float] = {}
        for role, kind in needs if self.partial else ():
            asked_ids = {rollout.id for rollout in self.scored(role, batch.rollouts)}
            unasked = [rollout for rollout in batch.rollouts if rollout.id not in asked_ids]
            signals[role, kind] |= {rollout.id: _unasked(role, rollout) for rollout in unasked}
        resident: AbstractContextManager[None] = nullcontext()
        if self.pager is not None:  # paged teachers are loaded in time, in this order
            resident = self.pager.scoring([model for name in asked for model in models_of(self.teachers[name])])
        with resident:
            for name, rollouts in asked.items():
                teacher = self.teachers[name]
                seen = self._texts(name, rollouts, batch, step, metrics)
                if step == 1 and isinstance(teacher, ScoringTeacher):
                    measured = teacher.measure([text for text in seen if text is not None])
                    metrics |= measured
                    for key, value in measured.items():
                        self.context.say_of_stage(f"{key} {value:.2e} nats per token of the first batch")
                for role, kind in (need for need in needs if need[0] == teacher.role):
                    need = self.objective.need_given(signals, role, kind)
                    answers = self._ask(teacher, rollouts, seen, need, mine, batch.written.resumed)
                    signals[role, kind] |= {item.id: signal for item, signal in zip(rollouts, answers, strict=True)}
                    self.context.check_stop()
        batch.signals, batch.scored = signals, True
        batch.metrics |= metrics

    def scores(self, role: str, domain: str) -> bool:
        """Whether some term compares answers of this domain with the role's model."""
        domains = self._domains.get(role)
        return domains is None or domain in domains

    def scored(self, role: str, rollouts: Sequence[Rollout]) -> list[Rollout]:
        return [rollout for rollout in rollouts if self.scores(role, rollout.domain)]

    def _texts(
        self, name: str, rollouts: Sequence[Rollout], batch: Batch, step: int, metrics: dict[str, float]
    ) -> list[Rendered | None]:
        """What a teacher reads of each rollout; None: its view has nothing to show for it."""
        view, teacher = self.spec.teachers[name].view, self.teachers[name]
        seen = texts_for(view, rollouts, batch.prompts, self.groups_for(name, batch.groups), teacher.context)
        if view.crosses:
            metrics |= _left_out(name, view, rollouts, seen)
            seen = [text if text is not None and (text.spans or not text.cut) else None for text in seen]
        unshown = sum(text is None for text in seen)
        if unshown or not view.as_sampled:
            metrics[f"unshown/{name}"] = unshown / len(seen)
            self._note_unshown(name, step, unshown == len(seen))
        return seen

    def _note_unshown(self, name: str, step: int, nothing: bool) -> None:
        """Warn about a view that shows nothing for several steps in a row, since it teaches nothing; repeat the warning later."""
        steps = self._unshown[name] = self._unshown[name] + 1 if nothing else 0
        if steps >= UNSHOWN and steps & (steps - 1) == 0:
            self.context.say_of_stage(
                f"WARNING: step {step}: the view of teachers.{name} has shown nothing for {steps} steps, so nothing "
                "is learnt from it. Check what it needs: columns, right answers in a group, feedback, the teacher's context"
            )

    def groups_for(self, teacher: str, groups: Mapping[str, Group]) -> Mapping[str, Group]:
        """The groups with the tokenizer of the chat template that the teacher's view uses."""
        tokenizer = self.templates[teacher]
        if self.spec.teachers[teacher].view.chat_template == "student":
            return groups
        return {name: replace(group, tokenizer=tokenizer, student=group.tokenizer) for name, group in groups.items()}

    def _by_model(self, batch: Batch, roles: Sequence[str]) -> dict[str, list[Rollout]]:
        """The rollouts that each teacher scores. Teachers that share a model are adjacent."""
        asked: dict[str, list[Rollout]] = {}
        for role in dict.fromkeys(roles):
            for rollout in self.scored(role, batch.rollouts) if self.partial else batch.rollouts:
                asked.setdefault(self._choose[role](batch.prompts[rollout.prompt_id]), []).append(rollout)
        sharing: dict[object, list[str]] = {}
        for name in asked:
            sharing.setdefault(self._models[name], []).append(name)
        return {name: asked[name] for names in sharing.values() for name in names}

    def context_of(self, prompt: Prompt) -> int:
        """How many tokens the prompt's own teacher can read."""
        return self.teachers[self.teacher_for(prompt)].context

    def _ask(
        self,
        teacher: TeacherLike,
        rollouts: Sequence[Rollout],
        seen: Sequence[Rendered | None],
        need: SignalNeed,
        mine: Collection[str],
        resumed: bool,
    ) -> list[Signal]:
        """One teacher's signals about these rollouts: the stored ones, and new ones for the rest, which are stored.

        `mine`: the rollouts that this process trains on. It asks about those and receives the other ranks' signals.
        `resumed`: an earlier process may have asked already.
        An exact resume uses all stored signals or none, because a teacher's rounding depends on what it scores together.
        """
        view, kind = self.spec.teachers[teacher.name].view.name, need.kind
        shown = {rollout.id: text for rollout, text in zip(rollouts, seen, strict=True) if text is not None}
        known = {rollout.id: _nothing(teacher, view, rollout) for rollout in rollouts if rollout.id not in shown}
        stored = self.ranks.share(partial(_stored, self.store, teacher, shown, kind)) if resumed else {}
        if self.spec.checkpoint.resume != "exact" or len(stored) == len(shown):
            known |= stored
        rest = [rollout for rollout in rollouts if rollout.id not in known]
        own = [rollout for rollout in rest if rollout.id in mine]
        together = teacher.model is not None and teacher.model.sharded  # sharded models score on all ranks together
        answers = teacher.score(own, need, [shown[rollout.id] for rollout in own]) if own or together else []
        written = kind not in INNER or (kind == "hidden" and self._keeps_hidden)
        if written and self.pager is not None:
            self.pager.check()  # a resumed run would trust what is in the store
        own_signals = {rollout.id: signal for rollout, signal in zip(own, answers, strict=True)}
        known |= self.ranks.exchange(own_signals, hidden=kind in INNER)
        stored_ones = [rollout for rollout in rest if TURN_OF not in rollout.extras]
        for rollout in stored_ones if written else ():
            signal = known[rollout.id]
            self.store.record_signal(
                rollout.id, teacher.role, kind, teacher.name, signal.teacher_version, _plain(signal.values), signal.mask,
                view=signal.view, spans=signal.spans, key=text_key(shown[rollout.id]),
            )  # fmt: skip
        if self.kept is not None:
            keep_scores(self.kept, teacher, kind, answers)
        return [known[rollout.id] for rollout in rollouts]


def _left_out(name: str, view: View, rollouts: Sequence[Rollout], seen: Sequence[Rendered | None]) -> dict[str, float]:
    """Shares of tokens that lie in no span and that a cut left out, over answers that a teacher with another tokenizer can read."""
    shown = [(rollout, text) for rollout, text in zip(rollouts, seen, strict=True) if text is not None]
    every = sum(max(rollout.response_ids.size - view.skip, 0) for rollout, _ in shown)
    inside = sum(s1 - s0 for _, text in shown for s0, s1, _, _ in text.spans)
    cut = sum(text.cut for _, text in shown)
    return {f"unaligned/{name}": (every - inside - cut) / max(every, 1), f"cut_off/{name}": cut / max(every, 1)}


def _nothing(teacher: TeacherLike, view: str, rollout: Rollout) -> Signal:
    """An empty signal, for a rollout that the teacher's view has nothing to show for."""
    size = rollout.response_ids.size
    return Signal(
        teacher.name, teacher.version, teacher.role, view, (), np.full(size, np.nan), np.zeros(size, dtype=bool)
    )


def _unasked(role: str, rollout: Rollout) -> Signal:
    """An empty signal, for a rollout of a domain that no term of the role trains on."""
    size = rollout.response_ids.size
    return Signal("", 0, role, "same", (), np.full(size, np.nan), np.zeros(size, dtype=bool))


def _stored(
    store: RolloutStore, teacher: TeacherLike, shown: dict[str, Rendered], kind: SignalKind
) -> dict[str, Signal]:
    """Stored signals of the same teacher and version about the same texts."""
    found = store.signals([name for name in shown if name in store.entries], teacher.role, kind)

    def again(key: str, signal: Signal) -> Signal:
        text, values = shown[key], signal.values
        ids = np.concatenate([text.ids[t0:t1] for _, _, t0, t1 in text.spans]) if text.crossed and text.spans else None
        return replace(signal, values=torch.from_numpy(np.asarray(values)) if kind == "hidden" else values, crossed=ids)

    return {
        key: again(key, signal)
        for key, signal in found.items()
        if (signal.teacher, signal.teacher_version) == (teacher.name, teacher.version)
        and (signal.view, signal.spans) == (shown[key].view, shown[key].spans)
        and signal.key in ("", text_key(shown[key]))  # older stores have no key
    }


def _plain(values: Any) -> Any:
    """Hidden states are tensors on the teacher's device. float32 represents every bfloat16 exactly."""
    return values.detach().float().cpu().numpy() if isinstance(values, torch.Tensor) else values
