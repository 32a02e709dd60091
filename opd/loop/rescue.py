"""Prompts that every sample failed are answered again under a view: `rollout.rescue`.

    failed groups -> (a model writes a hint) -> sample under the view -> reward -> right answers replace wrong ones

Everything is in the store, including hints, so an interrupted run continues with what it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from opd.engines.draws import request_key, uniforms
from opd.objective.batch import Written
from opd.records import Prompt, Rollout, Visit
from opd.rollouts.rollouter import Planned, as_trained
from opd.rollouts.settings import HINT, Rescue
from opd.rollouts.writers import ShownWriter, StudentWriter, TeacherWriter

if TYPE_CHECKING:
    from opd.loop.producer import BatchMaker


RESCUE_DRAW = -2  # sample number that keys the choice of samples to replace


@dataclass
class Failed:
    """A group without any right answer."""

    visit: Visit
    prompt: Prompt  # with the hint, if one was written
    members: list[Rollout]
    places: list[int]  # indices of the members to replace
    found: dict[int, Rollout]  # index -> the right answer


def rescue(
    maker: BatchMaker,
    visits: Sequence[Visit],
    rollouts: Sequence[Rollout],
    rewards: dict[str, float | None],
    written: Written,
) -> tuple[list[Rollout], dict[str, float]]:
    """Replace some wrong answers with right ones; returns the rollouts and metrics. Adds the new answers to `rewards` and `written`."""
    spec = maker.spec.rollout.rescue
    assert spec is not None
    failed = _failed(maker, spec, visits, rollouts, rewards)
    if spec.hint is not None and failed:
        written.add(_write_hints(maker, spec, failed))
    writer = ShownWriter(share=0.0, view=spec.view, trained_as=spec.trained_as)
    samples = maker.spec.rollout.samples
    unshown = tokens = 0
    for attempt in range(spec.attempts):
        planned: dict[str, Planned] = {}
        asked: dict[str, tuple[Failed, int]] = {}
        for group in failed:
            for place in (place for place in group.places if place not in group.found):
                shown = _shown(maker, spec, group, place, rewards)
                if shown is None:
                    unshown += attempt == 0
                    continue
                sample = samples * (attempt + 1) + place
                name = maker.rollouter.rollout_id(group.visit, sample)
                planned[name] = Planned(group.visit, sample, writer, shown, source=f"rescue:{spec.view.name}")
                asked[name] = group, place
        if not planned:
            break
        again = maker.rollouter.carry_out(planned, maker.samplers.version)
        written.add(again)
        tried = maker.ranks.share(partial(maker.store.load, again.ids))
        tokens += sum(rollout.response_ids.size for rollout in tried)
        given = maker.reward(tried, visits, written)
        for rollout in tried:
            reward = given.get(rollout.id)
            if reward is not None and reward >= spec.threshold:
                group, place = asked[rollout.id]
                group.found[place] = as_trained(rollout)
                rewards[rollout.id] = reward
    metrics: dict[str, float] = {"rescue/failed": len(failed) / max(len(visits), 1), "rescue/tokens": tokens}
    if failed:
        metrics["rescue/rescued"] = sum(bool(group.found) for group in failed) / len(failed)
        metrics["rescue/unshown"] = unshown / sum(len(group.places) for group in failed)
    return _replaced(rollouts, failed, rewards), metrics


def _failed(
    maker: BatchMaker,
    spec: Rescue,
    visits: Sequence[Visit],
    rollouts: Sequence[Rollout],
    rewards: Mapping[str, float | None],
) -> list[Failed]:
    """Groups that the student wrote, with all members rewarded and none right. A keyed draw chooses the members to replace."""
    found = []
    for visit in visits:
        members = [item for item in rollouts if (item.prompt_id, item.visit) == (visit.prompt.id, visit.visit)]
        known = [reward for item in members if (reward := rewards.get(item.id)) is not None]
        own = all(item.source == "student" for item in members)
        if not own or len(known) < len(members) or max(known) >= spec.threshold:
            continue
        draws = uniforms(request_key(maker.spec.seed, visit.prompt.id, visit.visit, RESCUE_DRAW), 0, len(members))
        places = sorted(np.argsort(draws, kind="stable")[: spec.replace].tolist())
        found.append(Failed(visit, visit.prompt, members, places, {}))
    return found


def _write_hints(maker: BatchMaker, spec: Rescue, failed: Sequence[Failed]) -> Written:
    """Write one hint for each failed prompt. Hints are sampled and stored like answers, and never trained on."""
    hint = spec.hint
    assert hint is not None
    writer = StudentWriter() if hint.by == "student" else TeacherWriter()
    sampling = replace(maker.rollouter.sampling, max_new_tokens=hint.max_new_tokens)
    sample = maker.spec.rollout.samples * (spec.attempts + 1)
    planned: dict[str, Planned] = {}
    for group in failed:
        question = hint.question.rewrite(group.visit.prompt)
        context = maker.context_of(hint.by, group.visit.prompt)
        if question is None or not maker.rollouter.fits(question, group.visit, hint.max_new_tokens, context):
            continue
        name = maker.rollouter.rollout_id(group.visit, sample)
        visit = replace(group.visit, prompt=question)
        planned[name] = Planned(visit, sample, writer, source=f"hint:{hint.by}", beside="/hint", sampling=sampling)
    if not planned:
        return Written()
    written = maker.rollouter.carry_out(planned, maker.samplers.version)
    hints = maker.ranks.share(lambda: maker.store.load(written.ids))
    texts = {item.prompt_id: maker.rewards.text(item) for item in hints}
    for group in failed:
        text = texts.get(group.visit.prompt.id, "").strip()
        if text:
            group.prompt = replace(group.prompt, fields={**group.prompt.fields, HINT: text})
    return written


def _shown(
    maker: BatchMaker, spec: Rescue, group: Failed, place: int, rewards: Mapping[str, float | None]
) -> Prompt | None:
    """What the student reads in one place of a failed group; None if there is nothing to show or it does not fit."""
    seen = maker.rewards.group(group.visit, group.members, rewards)
    shown: Prompt | None = spec.view.reprompt(group.prompt, group.members[place], seen)
    return shown if shown is not None and maker.rollouter.fits(shown, group.visit) else None


def _replaced(rollouts: Sequence[Rollout], failed: Sequence[Failed], rewards: dict[str, float | None]) -> list[Rollout]:
    """The rollouts in their order with the replacements. Replaced ones are also removed from the rewards."""
    instead = {group.members[place].id: answer for group in failed for place, answer in group.found.items()}
    for name in instead:
        del rewards[name]
    return [instead.get(rollout.id, rollout) for rollout in rollouts]
