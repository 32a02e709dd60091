"""A text that a model writes about a step's answers before teachers score them: `rollout.experience`.

It is sampled and stored like an answer, so an interrupted run does not ask for it again. It is never trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from opd.engines.draws import request_key, uniforms
from opd.objective.batch import Written
from opd.records import Prompt, Rollout, Visit
from opd.rollouts.rollouter import Planned
from opd.rollouts.settings import EXPERIENCE, TRAJECTORIES
from opd.rollouts.writers import StudentWriter, TeacherWriter
from opd.teachers.views import question

if TYPE_CHECKING:
    from opd.loop.producer import BatchMaker


EXPERIENCE_DRAW = -3  # sample number that keys the choice of answers to read


def write_experience(
    maker: BatchMaker,
    visit: Visit,
    rollouts: Sequence[Rollout],
    rewards: Mapping[str, float | None],
    prompts: Mapping[str, Prompt],
    written: Written,
) -> tuple[dict[str, Prompt], dict[str, float]]:
    """Add the text to the prompts as a field, if it fits and is not empty. Also returns the text's length as a metric."""
    spec = maker.spec.rollout.experience
    assert spec is not None
    draws = uniforms(request_key(maker.spec.seed, visit.prompt.id, visit.visit, EXPERIENCE_DRAW), 0, len(rollouts))
    chosen = np.argsort(draws, kind="stable")[: spec.trajectories]
    told = [_told(maker, rollouts[number], rewards, prompts) for number in sorted(chosen.tolist())]
    asked = replace(visit.prompt, fields={**visit.prompt.fields, TRAJECTORIES: "\n\n".join(told)})
    asked = spec.question.rewrite(asked)
    context = maker.context_of(spec.by, visit.prompt)
    if asked is None or not maker.rollouter.fits(asked, visit, spec.max_new_tokens, context):
        return dict(prompts), {"experience/tokens": 0}
    rescue = maker.spec.rollout.rescue
    sample = (
        maker.spec.rollout.samples * ((rescue.attempts if rescue is not None else 0) + 1) + 1
    )  # after rescues and a hint
    name = maker.rollouter.rollout_id(visit, sample)
    plan = Planned(
        replace(visit, prompt=asked),
        sample,
        StudentWriter() if spec.by == "student" else TeacherWriter(),
        source=f"experience:{spec.by}",
        beside="/experience",
        sampling=replace(maker.rollouter.sampling, max_new_tokens=spec.max_new_tokens),
    )
    answer = maker.rollouter.carry_out({name: plan}, maker.samplers.version)
    written.add(answer)
    (rollout,) = maker.ranks.share(partial(maker.store.load, answer.ids))
    text = maker.rewards.text(rollout).strip()
    found = {key: replace(prompt, fields={**prompt.fields, EXPERIENCE: text}) for key, prompt in prompts.items()}
    return found, {"experience/tokens": rollout.response_ids.size}


def _told(
    maker: BatchMaker, rollout: Rollout, rewards: Mapping[str, float | None], prompts: Mapping[str, Prompt]
) -> str:
    reward = rewards.get(rollout.id)
    scored = "" if reward is None else f"\n(reward {reward:g})"
    return f"{question(prompts[rollout.prompt_id])}\n{maker.rewards.text(rollout)}{scored}"
