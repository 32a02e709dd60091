"""What a model makes of a step's answers, written before teachers score them: `rollout.experience`.

It is sampled like an answer and kept in the store like one, so an interrupted run does not ask for it again; never trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from opd.data.stream import Visit
from opd.sampling.draws import request_key, uniforms
from opd.sampling.experience import EXPERIENCE, TRAJECTORIES
from opd.sampling.writers import StudentWriter, TeacherWriter
from opd.teachers.views import question
from opd.trainer.trajectories import Planned
from opd.types import Prompt, Rollout

if TYPE_CHECKING:
    from opd.runner.stage import StageRun

EXPERIENCE_DRAW = -3  # the sample number that keys "which answers are read?"


def write_experience(
    run: StageRun,
    visit: Visit,
    rollouts: Sequence[Rollout],
    rewards: Mapping[str, float | None],
    prompts: Mapping[str, Prompt],
) -> tuple[dict[str, Prompt], dict[str, float]]:
    """The prompts with what was written as a field, where it fits and says anything; and how long it is."""
    spec = run.spec.rollout.experience
    assert spec is not None
    draws = uniforms(request_key(run.spec.seed, visit.prompt.id, visit.visit, EXPERIENCE_DRAW), 0, len(rollouts))
    chosen = np.argsort(draws, kind="stable")[: spec.trajectories]
    told = [_told(run, rollouts[number], rewards, prompts) for number in sorted(chosen.tolist())]
    asked = replace(visit.prompt, fields={**visit.prompt.fields, TRAJECTORIES: "\n\n".join(told)})
    asked = spec.question.rewrite(asked)
    context = run.context_of(spec.by, visit.prompt)
    if asked is None or not run.trajectories.fits(asked, visit, spec.max_new_tokens, context):
        return dict(prompts), {"experience/tokens": 0}
    rescue = run.spec.rollout.rescue
    sample = (
        run.spec.rollout.samples * ((rescue.attempts if rescue is not None else 0) + 1) + 1
    )  # behind rescues and a hint
    name = run.trajectories.rollout_id(visit, sample)
    plan = Planned(
        replace(visit, prompt=asked),
        sample,
        StudentWriter() if spec.by == "student" else TeacherWriter(),
        source=f"experience:{spec.by}",
        beside="/experience",
        sampling=replace(run.sampling, max_new_tokens=spec.max_new_tokens),
    )
    ids = run.trajectories.carry_out({name: plan}, run.version)
    (written,) = run.world.share(partial(run.store.load, ids))
    text = run.text(written).strip()
    found = {key: replace(prompt, fields={**prompt.fields, EXPERIENCE: text}) for key, prompt in prompts.items()}
    return found, {"experience/tokens": written.response_ids.size}


def _told(run: StageRun, rollout: Rollout, rewards: Mapping[str, float | None], prompts: Mapping[str, Prompt]) -> str:
    reward = rewards.get(rollout.id)
    scored = "" if reward is None else f"\n(reward {reward:g})"
    return f"{question(prompts[rollout.prompt_id])}\n{run.text(rollout)}{scored}"
