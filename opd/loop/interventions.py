"""What happens to a step's answers between sampling and scoring, if the recipe asks for it.

    rollout.rescue           failed groups -> (a model writes a hint) -> sample under a view -> right answers replace wrong ones
    rollout.demonstrations   failed answers -> a model at a chat endpoint answers the same prompt -> its answers replace them
    rollout.experience       a model writes a text about the answers, which teachers' views can show

Everything is in the store, including hints and texts, so an interrupted run continues with what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from opd.common.chat_client import CallLog, Chat, ChatQuestion
from opd.engines.requests import request_key, uniforms
from opd.objective.batch import Written
from opd.records import Author, Prompt, Rollout, Sample, Visit
from opd.rewards import Rewarder
from opd.rewards.reward import DEFAULT, Rewards
from opd.rollouts.episodes import transcript
from opd.rollouts.rollouter import DEMONSTRATION, Planned, as_trained
from opd.rollouts.settings import EXPERIENCE, HINT, TRAJECTORIES, Demonstrations, Rescue
from opd.rollouts.writers import ShownWriter, StudentWriter, TeacherWriter
from opd.teachers.views import question

if TYPE_CHECKING:
    from opd.loop.producer import BatchMaker


RESCUE_DRAW = -2  # sample number that keys the choice of samples to replace
EXPERIENCE_DRAW = -3  # sample number that keys the choice of answers to read


# --- Rescue: prompts that every sample failed are answered again under a view ---


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
        given = maker.ranks.share(partial(maker.rewards.reward, tried, visits, written.resumed))
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
        asked = hint.question.rewrite(group.visit.prompt)
        context = maker.context_of(hint.by, group.visit.prompt)
        if asked is None or not maker.rollouter.fits(asked, group.visit, hint.max_new_tokens, context):
            continue
        name = maker.rollouter.rollout_id(group.visit, sample)
        visit = replace(group.visit, prompt=asked)
        planned[name] = Planned(
            visit, sample, writer, source=f"hint:{hint.by}", group_suffix="/hint", sampling=sampling
        )
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


# --- Demonstrations ---
#
# Their tokens are marked with a teacher as author: terms with ratios skip them, and cross-entropy learns from them. The failed answer
# stays in the store, with a note. An endpoint returns text, which the student's tokenizer encodes; the prompt's own teacher samples.
# With `cut`, a demonstration begins with the student's own tokens before the first bad step, with their log-probs.


@dataclass(frozen=True)
class Replacement:
    """What takes the place of a failed answer."""

    failed: Rollout
    kept: int  # tokens of the failed answer that it begins with
    text: str | None = None  # what follows; None: the prompt's own teacher writes it

    @property
    def start(self) -> Rollout | None:
        return beginning(self.failed, self.kept) if self.kept else None


def beginning(rollout: Rollout, tokens: int) -> Rollout:
    """The first tokens of an answer, as an unfinished one."""
    columns = ("response_ids", "author", "logprob", "logprob_sampled", "logprob_stop", "version")
    return replace(rollout, stop=None, **{name: getattr(rollout, name)[:tokens] for name in columns})


def demonstrate(
    maker: BatchMaker,
    visits: Sequence[Visit],
    rollouts: list[Rollout],
    rewards: dict[str, float | None],
    written: Written,
    version: int,
) -> list[Rollout]:
    """Replace answers that failed with demonstrations, and add the demonstrations' rewards to `rewards`."""
    demonstrator, store = maker.rewards.demonstrator, maker.store
    assert demonstrator is not None
    asked = {visit.prompt.id: visit for visit in visits}
    prompts = {name: visit.prompt for name, visit in asked.items()}
    found = demonstrator.replacements(rollouts, prompts, rewards, maker.rewards.text)
    names: dict[str, str] = {}
    planned: dict[str, Planned] = {}
    for one in found:
        failed, visit = one.failed, asked[one.failed.prompt_id]
        names[failed.id] = failed.id + DEMONSTRATION
        if one.text is None:
            sample = maker.spec.rollout.samples + failed.sample  # keys other draws than those of the failed answer
            planned[names[failed.id]] = Planned(visit, sample, TeacherWriter(), start=one.start)
        else:
            maker.rollouter.demonstrate(failed, visit, demonstrator.source, one.text, version, one.start)
    if planned:
        written.add(maker.rollouter.carry_out(planned, version))
    written.ids += names.values()
    for name in names:
        store.note(name, replaced=True)
    store.commit(sync=True)
    made = dict(zip(names, store.load(names.values()), strict=True))
    rewards |= maker.rewards.reward(list(made.values()), visits, written.resumed)
    return [made.get(rollout.id, rollout) for rollout in rollouts]


class Demonstrator:
    """Finds failed answers, where they fail, and asks for replacements."""

    def __init__(
        self,
        spec: Demonstrations,
        calls: CallLog,
        special: Sequence[str],
        check: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self.spec, self._special = spec, [token for token in special if token]
        self._chat = None if spec.endpoint is None else Chat(spec.endpoint, calls, check, "demonstration")
        self._decides: Rewarder | None = None
        if spec.by is not None:
            self._decides = Rewarder(Rewards(domains={DEFAULT: [spec.by]}), say=say)
            self._decides.remember(calls, check)
        self._seen = self._replaced = 0
        self._kept: list[float] = []  # shares of failed answers that are kept
        self._earned: list[float] = []  # rewards of the student's answers, replaced or not

    @property
    def source(self) -> str:
        return "teacher" if self.spec.endpoint is None else f"teacher:{self.spec.endpoint.model}"

    def replacements(
        self,
        rollouts: Sequence[Rollout],
        prompts: Mapping[str, Prompt],
        rewards: Mapping[str, float | None],
        text_of: Callable[[Rollout], str],
    ) -> list[Replacement]:
        """For answers of the student that failed. There is none for an answer that the endpoint does not replace."""
        own = [rollout for rollout in rollouts if (rollout.author == Author.STUDENT).any()]
        self._earned += [reward for rollout in own if (reward := rewards.get(rollout.id)) is not None]
        if self._decides is not None:
            samples = [Sample(prompts[rollout.prompt_id], text_of(rollout), rollout) for rollout in own]
            found = self._decides(samples)
            rewards = {rollout.id: result.reward for rollout, result in zip(own, found, strict=True)}
        known = {rollout.id: rewards.get(rollout.id) for rollout in own}
        failed = [rollout for rollout in own if (reward := known[rollout.id]) is not None and reward < self.spec.below]
        kept = self._good_beginnings(failed, prompts, text_of)
        made = [Replacement(rollout, kept[rollout.id]) for rollout in failed]
        if self._chat is not None:
            made = self._with_texts(self._chat, made, prompts, text_of)
        self._seen, self._replaced = self._seen + len(own), self._replaced + len(made)
        self._kept += [one.kept / one.failed.response_ids.size for one in made] if self.spec.cut != "none" else []
        return made

    def _with_texts(
        self, chat: Chat, made: Sequence[Replacement], prompts: Mapping[str, Prompt], text_of: Callable[[Rollout], str]
    ) -> list[Replacement]:
        """The same with what the endpoint wrote, where that can be used."""
        questions: list[tuple[Replacement, ChatQuestion]] = []
        for one in made:
            kept = text_of(one.start) if one.start is not None else ""
            asked = self.spec.question(one.failed.id, prompts[one.failed.prompt_id], kept)
            questions += [] if asked is None else [(one, asked)]
        answers = chat.ask([asked for _, asked in questions])
        found = [
            replace(one, text=answer.text.strip() if not one.kept else answer.text.rstrip())
            for (one, _), answer in zip(questions, answers, strict=True)
        ]
        return [one for one in found if self._usable(one.text or "")]

    def _good_beginnings(
        self, failed: Sequence[Rollout], prompts: Mapping[str, Prompt], text_of: Callable[[Rollout], str]
    ) -> dict[str, int]:
        """Rollout id -> the tokens before its first bad step: the one whose beginning is rewarded with less than `below`."""
        ends = {rollout.id: self._steps(rollout, text_of) for rollout in failed}
        kept, unknown = dict.fromkeys(ends, 0), list(failed)
        for step in range(max(map(len, ends.values()), default=0)):
            unknown = [rollout for rollout in unknown if len(ends[rollout.id]) > step]
            parts = [beginning(rollout, ends[rollout.id][step]) for rollout in unknown]
            assert self._decides is not None
            found = self._decides([Sample(prompts[part.prompt_id], text_of(part), part) for part in parts])
            good = [result.reward is None or result.reward >= self.spec.below for result in found]
            unknown = [rollout for rollout, passes in zip(unknown, good, strict=True) if passes]
            kept |= {rollout.id: ends[rollout.id][step] for rollout in unknown}
        return kept

    def _steps(self, rollout: Rollout, text_of: Callable[[Rollout], str]) -> list[int]:
        """Where the steps of an answer end, except for the last one."""
        size = rollout.response_ids.size
        if self.spec.cut == "none":
            return []
        if self.spec.cut == "tokens":
            return list(range(1, size))
        tokens = [replace(rollout, response_ids=rollout.response_ids[n : n + 1]) for n in range(size - 1)]
        return [place for place, token in enumerate(tokens, 1) if text_of(token).endswith("\n")]

    def _usable(self, text: str) -> bool:
        """Reject empty texts and texts with special tokens, such as one that would end a turn."""
        return bool(text) and not any(token in text for token in self._special)

    def drain(self) -> dict[str, float]:
        """Statistics since the last call. `share`: the fraction of the student's answers that were replaced."""
        found = {"share": self._replaced / max(self._seen, 1)}
        if self._chat is not None:
            found |= self._chat.drain()
        if self._kept:  # of the answers that were cut
            found["kept"] = sum(self._kept) / len(self._kept)
        if self._earned:  # `reward` in the metrics counts the answers after replacement
            found["reward_before"] = sum(self._earned) / len(self._earned)
        if self._decides is not None:
            found |= {f"by/{name}": count for name, count in self._decides.drain().items()}
        self._seen, self._replaced, self._kept, self._earned = 0, 0, [], []
        return {f"demonstrations/{name}": count for name, count in found.items()}

    def close(self) -> None:
        if self._chat is not None:
            self._chat.close()
        if self._decides is not None:
            self._decides.close()


# --- Experience: a text that a model writes about a step's answers before teachers score them ---
#
# It is sampled and stored like an answer, and never trained on.


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
    texts = [_answer_text(maker, rollouts[number], rewards, prompts) for number in sorted(chosen.tolist())]
    asked = replace(visit.prompt, fields={**visit.prompt.fields, TRAJECTORIES: "\n\n".join(texts)})
    asked = spec.question.rewrite(asked)
    context = maker.context_of(spec.by, visit.prompt)
    if asked is None or not maker.rollouter.fits(asked, visit, spec.max_new_tokens, context):
        return dict(prompts), {"experience/tokens": 0}
    drawn = maker.spec.rollout
    attempts = max(again.attempts if again is not None else 0 for again in (drawn.rescue, drawn.takeover))
    sample = drawn.samples * (attempts + 1) + 1  # after rescues and a hint, or takeovers
    name = maker.rollouter.rollout_id(visit, sample)
    plan = Planned(
        replace(visit, prompt=asked),
        sample,
        StudentWriter() if spec.by == "student" else TeacherWriter(),
        source=f"experience:{spec.by}",
        group_suffix="/experience",
        sampling=replace(maker.rollouter.sampling, max_new_tokens=spec.max_new_tokens),
    )
    answer = maker.rollouter.carry_out({name: plan}, maker.samplers.version)
    written.add(answer)
    (rollout,) = maker.ranks.share(partial(maker.store.load, answer.ids))
    text = maker.rewards.text(rollout).strip()
    found = {key: replace(prompt, fields={**prompt.fields, EXPERIENCE: text}) for key, prompt in prompts.items()}
    return found, {"experience/tokens": rollout.response_ids.size}


def _answer_text(
    maker: BatchMaker, rollout: Rollout, rewards: Mapping[str, float | None], prompts: Mapping[str, Prompt]
) -> str:
    reward = rewards.get(rollout.id)
    scored = "" if reward is None else f"\n(reward {reward:g})"
    prompt = prompts[rollout.prompt_id]
    played = prompt.environment is not None
    said = transcript(rollout, maker.rollouter.tokenizer) if played else maker.rewards.text(rollout)
    return f"{question(prompt)}\n{said}{scored}"
