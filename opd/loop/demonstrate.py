"""Demonstrations replace failed answers: a model at a chat endpoint answers the same prompt.

The tokens are marked with that model as author: terms with ratios skip them, and cross-entropy learns from them. The failed
answer stays in the store, with a note. The endpoint returns text, which the student's tokenizer encodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from opd.common.chat_client import CallLog, Chat
from opd.records import Author, Prompt, Rollout, Sample
from opd.rewards import Rewarder
from opd.rewards.reward import DEFAULT, Rewards
from opd.rollouts.settings import Demonstrations


class Demonstrator:
    """Finds failed answers and asks for replacements."""

    def __init__(
        self,
        spec: Demonstrations,
        calls: CallLog,
        special: Sequence[str],
        check: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self.spec, self._special = spec, [token for token in special if token]
        self._chat = Chat(spec.endpoint, calls, check, "demonstration")
        self._decides: Rewarder | None = None
        if spec.by is not None:
            self._decides = Rewarder(Rewards(domains={DEFAULT: [spec.by]}), say=say)
            self._decides.remember(calls, check)
        self._seen = self._replaced = 0
        self._earned: list[float] = []  # rewards of the student's answers, replaced or not

    @property
    def source(self) -> str:
        return f"teacher:{self.spec.endpoint.model}"

    def texts(
        self,
        rollouts: Sequence[Rollout],
        prompts: Mapping[str, Prompt],
        rewards: Mapping[str, float | None],
        text_of: Callable[[Rollout], str],
    ) -> dict[str, str]:
        """Rollout id -> the replacement, for answers of the student that failed."""
        own = [rollout for rollout in rollouts if (rollout.author == Author.STUDENT).any()]
        self._earned += [reward for rollout in own if (reward := rewards.get(rollout.id)) is not None]
        if self._decides is not None:
            samples = [Sample(prompts[rollout.prompt_id], text_of(rollout), rollout) for rollout in own]
            found = self._decides(samples)
            rewards = {rollout.id: result.reward for rollout, result in zip(own, found, strict=True)}
        known = {rollout.id: rewards.get(rollout.id) for rollout in own}
        failed = [rollout for rollout in own if (reward := known[rollout.id]) is not None and reward < self.spec.below]
        questions = [
            asked
            for rollout in failed
            if (asked := self.spec.question(rollout.id, prompts[rollout.prompt_id])) is not None
        ]
        written = {
            asked.about: answer.text.strip() for asked, answer in zip(questions, self._chat.ask(questions), strict=True)
        }
        usable = {name: text for name, text in written.items() if name is not None and self._usable(text)}
        self._seen, self._replaced = self._seen + len(own), self._replaced + len(usable)
        return usable

    def _usable(self, text: str) -> bool:
        """Reject empty texts and texts with special tokens, such as one that would end a turn."""
        return bool(text) and not any(token in text for token in self._special)

    def drain(self) -> dict[str, float]:
        """Statistics since the last call. `share`: the fraction of the student's answers that were replaced."""
        found = {"share": self._replaced / max(self._seen, 1), **self._chat.drain()}
        if self._earned:  # `reward` in the metrics counts the answers after replacement
            found["reward_before"] = sum(self._earned) / len(self._earned)
        if self._decides is not None:
            found |= {f"by/{name}": count for name, count in self._decides.drain().items()}
        self._seen, self._replaced, self._earned = 0, 0, []
        return {f"demonstrations/{name}": count for name, count in found.items()}

    def close(self) -> None:
        self._chat.close()
        if self._decides is not None:
            self._decides.close()
