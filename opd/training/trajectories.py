"""Who writes the tokens of a step: the student, the dataset, or the prompt's own teacher. All of it goes into the store.

Which one is decided per visit by a draw keyed like the sampler's, so it depends on nothing else in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from opd.config import PromptSource, Rollouts
from opd.data.render import render_completion, render_prompt
from opd.data.stream import Visit
from opd.errors import DataError
from opd.rollout.draws import request_key, uniforms
from opd.rollout.store import RolloutStore
from opd.types import Author, Finished, Prompt, SampledToken, Sampler, SampleRequest, Sampling

COMMIT_TOKENS = 512  # group commit: tokens buffered before they are written
TRAJECTORY_DRAW = -1  # the sample number that keys "who writes?"


@dataclass
class Trajectories:
    """Collects rollouts for visits. `teacher_for` names the teacher of a domain; `samplers` are looked up when needed."""

    stage: str
    seed: int
    spec: Rollouts
    sources: Sequence[PromptSource]
    tokenizer: object
    sampling: Sampling
    store: RolloutStore
    sampler: Sampler
    teacher_for: Mapping[str, str]
    teacher_sampler: Callable[[str], Sampler]
    mixed_sampler: Callable[[str], Sampler]
    max_prompt_tokens: int
    check_stop: Callable[[], None] = lambda: None
    on_token: Callable[[], None] = lambda: None

    def collect(self, visits: Sequence[Visit], version: int) -> list[str]:
        """Ids of the finished rollouts, in the order of the visits. Nothing is returned that is not in the store."""
        ids: list[str] = []
        requests: dict[str, list[SampleRequest]] = {}
        for visit in visits:
            author = self._author(visit)
            prompt_ids = self.prompt_ids(visit.prompt, self.sources[visit.source])
            for sample in range(self.spec.samples):
                rollout_id = f"{self.stage}/{visit.prompt.id}/{visit.visit}/{sample}"
                ids.append(rollout_id)
                self._begin(rollout_id, visit, sample, author, prompt_ids)
                if author == "data":
                    self._write_completion(rollout_id, visit.prompt, version)
                else:
                    key = request_key(self.seed, visit.prompt.id, visit.visit, sample)
                    requests.setdefault(author, []).append(SampleRequest(rollout_id, prompt_ids, key, self.sampling))
        for author, wanted in requests.items():
            if author == "student":
                self._sample(self.sampler, wanted, Author.STUDENT)
            elif author.startswith("mixed:"):
                self._sample(self.mixed_sampler(author.removeprefix("mixed:")), wanted, Author.STUDENT)
            else:
                self._sample(self.teacher_sampler(author.removeprefix("teacher:")), wanted, Author.TEACHER)
        self.store.commit(sync=True)
        return ids

    def prompt_ids(self, prompt: Prompt, source: PromptSource) -> np.ndarray:
        ids = render_prompt(prompt, self.tokenizer, source.chat_template_kwargs)
        if ids.size > self.max_prompt_tokens:
            raise DataError(
                f"prompt {prompt.id!r} has {ids.size} tokens, and at most {self.max_prompt_tokens} fit beside rollout.max_new_tokens "
                f"{self.spec.max_new_tokens}. Shorten it, or lower rollout.max_new_tokens."
            )
        return ids

    def _author(self, visit: Visit) -> str:
        """student | data | teacher:NAME, by a keyed draw; mixed:NAME in the student's place with a teacher mixed in."""
        student = f"mixed:{self.teacher_for[visit.prompt.domain]}" if self.spec.teacher_mix else "student"
        if not self.spec.data_share and not self.spec.teacher_share:
            return student
        draw = uniforms(request_key(self.seed, visit.prompt.id, visit.visit, TRAJECTORY_DRAW), 0, 1)[0]
        if draw < self.spec.data_share:
            return "data"
        if draw < self.spec.data_share + self.spec.teacher_share:
            return f"teacher:{self.teacher_for[visit.prompt.domain]}"
        return student

    def _begin(self, rollout_id: str, visit: Visit, sample: int, source: str, prompt_ids: np.ndarray) -> None:
        prompt = visit.prompt
        self.store.begin(
            id=rollout_id, prompt_id=prompt.id, visit=visit.visit, sample=sample, domain=prompt.domain, source=source,
            group=f"{prompt.id}/{visit.visit}", prompt_ids=prompt_ids,
        )  # fmt: skip

    def _write_completion(self, rollout_id: str, prompt: Prompt, version: int) -> None:
        ids, cut = render_completion(prompt, self.tokenizer, self.spec.max_new_tokens)
        self.store.extend(rollout_id, ids, Author.DATA, version)
        self.store.finish(rollout_id, "length" if cut else "stop")

    def _sample(self, sampler: Sampler, requests: Sequence[SampleRequest], author: Author) -> None:
        waiting = 0
        for event in sampler.sample(requests):
            if isinstance(event, SampledToken):
                self.store.append(event, author)
                waiting += 1
                self.on_token()
                if waiting >= COMMIT_TOKENS:
                    self.store.commit()
                    self.check_stop()
                    waiting = 0
            elif isinstance(event, Finished):
                self.store.finish(event.request_id, event.stop)
