"""The rewards of a step: given to finished rollouts, noted in the store, and shown to teachers' views.

An interrupted run finds them in the store and does not ask again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial

from opd.common.errors import TrainingError
from opd.data.render import response_text
from opd.loop.demonstrate import Demonstrator
from opd.loop.ranks import Ranks
from opd.objective.batch import Written
from opd.recipe import Stage
from opd.records import Prompt, Rollout, Sample, Visit
from opd.rewards import Rewarder
from opd.rollouts.rollouter import Rollouter
from opd.store import RolloutStore
from opd.teachers.views import Group


class RolloutRewards:
    """Rewards rollouts of a stage. `lock`: held while rewards are computed, because evaluation may use the rewarder at the same time."""

    def __init__(
        self,
        spec: Stage,
        rewarder: Rewarder,
        store: RolloutStore,
        tokenizer: object,
        stop_ids: tuple[int, ...],
        ranks: Ranks,
        demonstrator: Demonstrator | None,
    ) -> None:
        self.rewarder, self.demonstrator, self.lock = rewarder, demonstrator, threading.Lock()
        self._spec, self._store, self._ranks = spec, store, ranks
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        rescue = spec.rollout.rescue
        views = [*(kind.view for kind in spec.teachers.values()), *([rescue.view] if rescue is not None else [])]
        self._keeps_feedback = any(view.reads_feedback for view in views)
        self._unrewarded = 0  # steps in a row without rewards

    def text(self, rollout: Rollout) -> str:
        return response_text(rollout.response_ids, self._tokenizer, self._stop_ids)

    def reward(self, rollouts: Sequence[Rollout], visits: Sequence[Visit], taken_up: bool) -> dict[str, float | None]:
        """Rewards of rollouts with prompts that can be rewarded. None: the reward failed, which is not 0.

        `taken_up`: an earlier process may have rewarded some of them.
        """
        known = self._rewarded_before(rollouts) if taken_up else {}
        if self._spec.rollout.environment is not None:
            known = self._earned(rollouts) | known
        prompts = {visit.prompt.id: visit.prompt for visit in visits}
        asked = [
            rollout
            for rollout in rollouts
            if rollout.id not in known and self.rewarder.covers(prompts[rollout.prompt_id])
        ]
        samples = [Sample(prompts[rollout.prompt_id], self.text(rollout), rollout) for rollout in asked]
        for rollout, result in zip(asked, self.rewarder(samples), strict=True):
            known[rollout.id] = result.reward
            feedback = {"feedback": result.feedback} if self._keeps_feedback and result.feedback else {}
            self._store.note(rollout.id, reward=result.reward, **feedback)
        return {rollout.id: known[rollout.id] for rollout in rollouts if rollout.id in known}

    def _earned(self, rollouts: Sequence[Rollout]) -> dict[str, float | None]:
        """Sums of an environment's turn rewards, for rollouts that have any. Other rewards are not asked for these."""
        earned: dict[str, float | None] = {}
        for rollout in rollouts:
            turns = self._store.entries[rollout.id].notes.get("turn_rewards")
            if turns is not None:
                earned[rollout.id] = float(sum(reward for reward in turns if reward is not None))
                self._store.note(rollout.id, reward=earned[rollout.id])
        return earned

    def _rewarded_before(self, rollouts: Sequence[Rollout]) -> dict[str, float | None]:
        notes = {rollout.id: self._store.entries[rollout.id].notes for rollout in rollouts}
        return {key: found["reward"] for key, found in notes.items() if "reward" in found}

    def demonstrate(
        self,
        rollouts: list[Rollout],
        rewards: dict[str, float | None],
        visits: Sequence[Visit],
        rollouter: Rollouter,
        written: Written,
        version: int,
    ) -> list[Rollout]:
        """Replace answers that failed with demonstrations, and add the demonstrations' rewards to `rewards`."""
        if self.demonstrator is None:
            return rollouts
        asked = {visit.prompt.id: visit for visit in visits}
        prompts: dict[str, Prompt] = {name: visit.prompt for name, visit in asked.items()}
        texts = self.demonstrator.texts(rollouts, prompts, rewards, self.text)
        source = self.demonstrator.source
        names = {
            rollout.id: rollouter.demonstrate(rollout, asked[rollout.prompt_id], source, texts[rollout.id], version)
            for rollout in rollouts
            if rollout.id in texts
        }
        written.ids += names.values()
        for name in names:
            self._store.note(name, replaced=True)
        self._store.commit(sync=True)
        made = dict(zip(names, self._store.load(names.values()), strict=True))
        rewards |= self.reward(list(made.values()), visits, written.taken_up)
        return [made.get(rollout.id, rollout) for rollout in rollouts]

    def group(self, visit: Visit, rollouts: Sequence[Rollout], rewards: Mapping[str, float | None]) -> Group:
        """The rollouts of one visit, as a teacher's view sees them."""
        kwargs = self._spec.prompts[visit.source].chat_template_kwargs
        feedback = self._ranks.share(partial(self._feedback, rollouts)) if self._keeps_feedback else {}
        return Group(rollouts, self._tokenizer, rewards, kwargs, self._stop_ids, feedback)

    def _feedback(self, rollouts: Sequence[Rollout]) -> dict[str, str]:
        """The feedback that came with their rewards, from the store."""
        return {rollout.id: self._store.entries[rollout.id].notes.get("feedback", "") for rollout in rollouts}

    def require_rewarded(self, step: int, rewards: Mapping[str, float | None]) -> None:
        """Stop if terms or views use rewards and no rollout has had one for several steps: nothing would be learned."""
        none = self._spec.uses_rewards and all(reward is None for reward in rewards.values())
        self._unrewarded = self._unrewarded + 1 if none else 0
        if self._unrewarded >= self._spec.rewards.stop_after:
            raise TrainingError(
                f"step {step}: nothing was rewarded for {self._unrewarded} steps. The last reason: {self.rewarder.last_failure}. "
                "log.txt has the first failures of each reward; fix the reward, or raise rewards.stop_after."
            )
