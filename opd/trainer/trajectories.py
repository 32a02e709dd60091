"""The answers of a step, from their writers into the store.

Who writes is decided per visit by a draw keyed like the sampler's, so it depends on nothing else in the batch.

What an earlier process of the same run left in the store is used: finished rollouts as they are, unfinished ones from their
last durable token on. They are never begun again, since that would favour short answers: long ones are interrupted more often.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from opd.data.render import render_prompt
from opd.data.source import PromptSource
from opd.data.stream import Visit
from opd.errors import DataError, TrainingError
from opd.sampling.draws import request_key, uniforms
from opd.sampling.rollouts import Rollouts
from opd.sampling.writers import AUTHORS, Desk, Writer
from opd.store import RolloutStore
from opd.types import Author, Finished, Prompt, Rollout, SampledToken, SampleRequest, Sampling, TokenSampler

COMMIT_TOKENS = 512  # group commit: tokens buffered before they are written
TRAJECTORY_DRAW = -1  # the sample number that keys "who writes?"


@dataclass
class Trajectories:
    """Collects rollouts for visits."""

    stage: str
    seed: int
    spec: Rollouts
    sources: Sequence[PromptSource]
    tokenizer: object
    sampling: Sampling
    store: RolloutStore
    desk: Desk
    max_prompt_tokens: int
    exact: bool = False  # replay unfinished rollouts token by token instead of prefilling them
    check_stop: Callable[[], None] = lambda: None
    on_token: Callable[[], None] = lambda: None
    consumed: int | None = (
        0  # rollouts in the store that belong to earlier steps and stages; None: unknown, it was repaired
    )
    newest: list[str] = field(default_factory=list)  # ids of the latest batch
    used: int = 0  # rollouts of the latest batch that an earlier process had finished
    continued: int = 0  # and those it had begun
    _replay: dict[str, DurableTokens] = field(default_factory=dict)

    def collect(self, visits: Sequence[Visit], version: int) -> list[str]:
        """Ids of the finished rollouts, in the order of the visits. Nothing is returned that is not in the store."""
        planned: dict[str, tuple[Visit, int]] = {}
        for visit in visits:
            for sample in range(self.spec.samples):
                if planned.setdefault(self.rollout_id(visit, sample), (visit, sample))[0] is not visit:
                    raise _twice(visit.prompt)
        prompts = {visit.prompt.id: self.prompt_ids(visit.prompt, self.sources[visit.source]) for visit in visits}
        durable = self._take_up(planned, prompts)
        requests: dict[str, tuple[Writer, list[SampleRequest]]] = {}
        for rollout_id, (visit, sample) in planned.items():
            if rollout_id in self.store.entries and rollout_id not in durable:
                continue  # finished by an earlier process
            writer, prompt_ids = self._writer(visit), prompts[visit.prompt.id]
            source = writer.source(visit, self.desk)
            if rollout_id not in durable:
                self._begin(rollout_id, visit, sample, source, prompt_ids)
            completion = writer.completion(visit, self.desk)
            if completion is not None:
                self._write(rollout_id, completion, writer, version, durable.get(rollout_id))
            else:
                key = request_key(self.seed, visit.prompt.id, visit.visit, sample)
                request = SampleRequest(rollout_id, prompt_ids, key, self.sampling)
                request = self._go_on(request, durable.get(rollout_id), writer, version)
                requests.setdefault(source, (writer, []))[1].append(request)
        for source, (writer, wanted) in requests.items():
            self._sample(writer.sampler(source, self.desk), wanted, AUTHORS[writer.author])
        self.store.commit(sync=True)
        self.consumed = None if self.consumed is None else self.consumed + len(planned)
        self.newest = list(planned)
        return self.newest

    @property
    def taken_up(self) -> bool:
        """Whether the latest batch has rollouts of an earlier process, which may have been rewarded and scored already."""
        return bool(self.used or self.continued)

    def rollout_id(self, visit: Visit, sample: int) -> str:
        return f"{self.stage}/{visit.prompt.id}/{visit.visit}/{sample}"

    # What an earlier process left

    def _take_up(
        self, planned: Mapping[str, tuple[Visit, int]], prompts: Mapping[str, np.ndarray]
    ) -> dict[str, Rollout]:
        """Unfinished rollouts of this batch, with their durable tokens."""
        known = {
            rollout_id: self.store.entries[rollout_id] for rollout_id in planned if rollout_id in self.store.entries
        }
        for rollout_id, entry in known.items():
            if self.consumed is not None and entry.number < self.consumed:
                raise _twice(planned[rollout_id][0].prompt)
        open_ids = [rollout_id for rollout_id, entry in known.items() if entry.stop is None]
        finished = [rollout_id for rollout_id, entry in known.items() if entry.stop is not None]
        durable = dict(zip(open_ids, self.store.partial(open_ids), strict=True)) if open_ids else {}
        self.used, self.continued = len(finished), len(open_ids)
        for rollout in [*(self.store.load(finished) if finished else ()), *durable.values()]:
            if not np.array_equal(rollout.prompt_ids, prompts[rollout.prompt_id]):
                raise DataError(
                    f"prompt {rollout.prompt_id!r} reads differently now than when the run began. Its source has changed: put it back, "
                    "or start a new run."
                )
        return durable

    def _go_on(self, request: SampleRequest, durable: Rollout | None, writer: Writer, version: int) -> SampleRequest:
        if durable is None or not durable.response_ids.size:
            return request
        versions = sorted({*durable.version.tolist(), version})
        if writer.author == "student" and len(versions) > 1 and self.spec.mixed_versions == "refuse":
            raise TrainingError(
                f"rollout {request.id!r} was begun by policy version {versions[0]} and would go on with version {version}; "
                "rollout.mixed_versions is `refuse`. Set it to `allow`: every token keeps its own version and log-prob."
            )
        if self.exact:
            self._replay[request.id] = DurableTokens(durable)
            return request
        return replace(request, prefix_ids=durable.response_ids)

    def prompt_ids(self, prompt: Prompt, source: PromptSource) -> np.ndarray:
        ids = render_prompt(prompt, self.tokenizer, source.chat_template_kwargs)
        if ids.size > self.max_prompt_tokens:
            raise DataError(
                f"prompt {prompt.id!r} has {ids.size} tokens, and at most {self.max_prompt_tokens} fit beside rollout.max_new_tokens "
                f"{self.spec.max_new_tokens}. Shorten it, or lower rollout.max_new_tokens."
            )
        return ids

    def _writer(self, visit: Visit) -> Writer:
        everyone: list[Writer] = self.spec.everyone
        if len(everyone) == 1:
            return everyone[0]
        draw = uniforms(request_key(self.seed, visit.prompt.id, visit.visit, TRAJECTORY_DRAW), 0, 1)[0]
        below = 0.0
        for writer in everyone[:-1]:
            below += writer.share
            if draw < below:
                return writer
        return everyone[-1]

    def _begin(self, rollout_id: str, visit: Visit, sample: int, source: str, prompt_ids: np.ndarray) -> None:
        prompt = visit.prompt
        self.store.begin(
            id=rollout_id, prompt_id=prompt.id, visit=visit.visit, sample=sample, domain=prompt.domain, source=source,
            group=f"{prompt.id}/{visit.visit}", prompt_ids=prompt_ids,
        )  # fmt: skip

    def _write(
        self,
        rollout_id: str,
        completion: tuple[np.ndarray, bool],
        writer: Writer,
        version: int,
        durable: Rollout | None,
    ) -> None:
        ids, cut = completion
        done = durable.response_ids.size if durable is not None else 0
        self.store.extend(rollout_id, ids[done:], AUTHORS[writer.author], version)
        self.store.finish(rollout_id, "length" if cut else "stop")

    def _sample(self, sampler: TokenSampler, requests: Sequence[SampleRequest], author: Author) -> None:
        waiting = 0
        for event in sampler.sample(requests):
            if isinstance(event, SampledToken):
                self.on_token()
                replay = self._replay.get(event.request_id)
                if replay is not None and replay.holds(event):
                    continue
                self.store.append(event, author)
                waiting += 1
                if waiting >= COMMIT_TOKENS:
                    self.store.commit()
                    waiting = 0
            elif isinstance(event, Finished):
                self.store.finish(event.request_id, event.stop)
                self._replay.pop(event.request_id, None)
            self.check_stop()


def _twice(prompt: Prompt) -> DataError:
    return DataError(
        f"prompt {prompt.id!r} comes twice in one pass: two rows or two sources share its id. Give every prompt its own."
    )


class DurableTokens:
    """The durable tokens of one rollout, compared bit by bit with the same tokens drawn again."""

    def __init__(self, durable: Rollout) -> None:
        self._durable, self._next = durable, 0

    def holds(self, token: SampledToken) -> bool:
        """Whether the store has this token already. One that differs is an error: the rest would differ too."""
        known, at = self._durable, self._next
        if at == known.response_ids.size:
            return False
        self._next += 1
        drawn = np.array([token.logprob, token.logprob_sampled, token.logprob_stop], dtype=np.float32)
        stored = np.array([known.logprob[at], known.logprob_sampled[at], known.logprob_stop[at]], dtype=np.float32)
        if (token.token, token.version, drawn.tobytes()) != (
            known.response_ids[at],
            known.version[at],
            stored.tobytes(),
        ):
            raise TrainingError(
                f"rollout {known.id!r}, token {at}: drawn again it is {token.token} (log-prob {token.logprob:.9g}, version {token.version}), but the "
                f"store holds {known.response_ids[at]} ({known.logprob[at]:.9g}, version {known.version[at]}). An exact resume needs the same "
                "machine, versions and thread count; go on without it: opd resume RUN --mode prefill"
            )
        return True
