"""Somebody else plays one turn of an episode: `rollout.takeover`.

    episode that failed   -> its first wrong turn -> the same turns up to there, the corrected turn, the student again
    or turn k of any

The new episode is another rollout of the same visit. It begins with the turns of the first one, token by token with their authors and
log-probs, which the environment answers as before; the corrected turn has the author teacher. The facts are with the rollout in the
store, so an interrupted run continues with the turn that was corrected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.data.prompts import response_text
from opd.engines.requests import request_key
from opd.objective.batch import Written, own_turns
from opd.records import Author, Rollout, SampleRequest, Sampling, Visit
from opd.rollouts.episodes import ROUNDING, TAKEOVER, Dialogue, GivenTurn, GivenTurns
from opd.rollouts.rollouter import Planned, answers, as_trained
from opd.rollouts.settings import Takeover
from opd.rollouts.writers import StudentWriter, TeacherWriter

if TYPE_CHECKING:
    from opd.loop.producer import BatchMaker


@dataclass
class Candidate:
    """An episode that may be taken over. `last`: it, or the newest that began with its turns."""

    visit: Visit
    first: Rollout
    last: Rollout
    closed: bool = False  # nothing more is to be corrected
    won: bool = False  # `last` succeeded


@dataclass(frozen=True)
class CorrectedTurn:
    """What replaces a turn of an episode."""

    turn: int  # from 0
    ids: np.ndarray  # int32, the stop token included
    right: str
    wrong: str

    def facts(self, of: Rollout, key: int) -> dict[str, Any]:
        """`key`: of the episode. Its 64 bits are kept as text."""
        said = {"turn": self.turn, "right": self.right, "wrong": self.wrong, "ids": self.ids.tolist()}
        return {"of": of.id, "key": str(key), **said}


def take_over(
    maker: BatchMaker,
    visits: Sequence[Visit],
    rollouts: Sequence[Rollout],
    rewards: dict[str, float | None],
    written: Written,
) -> tuple[list[Rollout], dict[str, float]]:
    """Replace episodes by those with a takeover; returns the rollouts and metrics. Adds the new ones to `rewards` and `written`."""
    spec = maker.spec.rollout.takeover
    assert spec is not None
    asked = {visit.prompt.id: visit for visit in visits}
    played = [
        Candidate(asked[rollout.prompt_id], rollout, rollout)
        for rollout in rollouts
        if asked[rollout.prompt_id].prompt.environment is not None and rollout.source == "student"
    ]
    wanted = [one for one in played if spec.turn != "wrong" or _failed(spec, rewards.get(one.first.id))]
    tokens, names = 0, set[str]()
    for attempt in range(spec.attempts if spec.turn == "wrong" else 1):
        found = _corrections(maker, spec, [one for one in wanted if not one.closed], attempt)
        if not found:
            break
        planned = {name: _planned(maker, spec, one, correction, attempt) for name, (one, correction) in found.items()}
        again = maker.rollouter.carry_out(planned, maker.samplers.version)
        written.add(again)
        tried = maker.load(again.ids)
        names |= {*again.ids}
        tokens += sum(rollout.response_ids.size for rollout in tried)
        rewards |= maker.ranks.share(partial(maker.rewards.reward, tried, visits, written.resumed))
        for rollout in tried:
            candidate, reward = found[rollout.id][0], rewards.get(rollout.id)
            if spec.turn == "wrong" and reward is None:
                candidate.closed = True  # the environment lost it: the original stays
                continue
            candidate.last = as_trained(rollout)
            candidate.closed = candidate.won = not _failed(spec, reward)
    return _replaced(spec, rollouts, played, wanted, rewards, names, tokens)


def _failed(spec: Takeover, reward: float | None) -> bool:
    """Whether an episode has a reward, and one that is too small."""
    return reward is not None and reward < spec.threshold - ROUNDING


def _replaced(
    spec: Takeover,
    rollouts: Sequence[Rollout],
    played: Sequence[Candidate],
    wanted: Sequence[Candidate],
    rewards: dict[str, float | None],
    tried: set[str],
    tokens: int,
) -> tuple[list[Rollout], dict[str, float]]:
    instead = {
        one.first.id: one.last for one in wanted if one.last is not one.first and (one.won or spec.turn != "wrong")
    }
    turns = [rollout.extras[TAKEOVER]["turn"] + 1 for rollout in instead.values()]
    for name in tried | instead.keys():
        if name not in {rollout.id for rollout in instead.values()}:
            rewards.pop(name, None)
    metrics = {
        "takeover/wanted": len(wanted) / max(len(played), 1),
        "takeover/replaced": len(instead) / max(len(played), 1),
        "takeover/tokens": float(tokens),
    }
    if turns:
        metrics["takeover/turn"] = float(np.mean(turns))
    return [instead.get(rollout.id, rollout) for rollout in rollouts], metrics


def _name(maker: BatchMaker, one: Candidate, attempt: int) -> tuple[str, int]:
    """Id and sample number of a takeover. Numbers of samples follow those of the group."""
    sample = maker.spec.rollout.samples * (attempt + 1) + one.first.sample
    return maker.rollouter.rollout_id(one.visit, sample), sample


def _corrections(
    maker: BatchMaker, spec: Takeover, candidates: Sequence[Candidate], attempt: int
) -> dict[str, tuple[Candidate, CorrectedTurn]]:
    """By the new rollout's id: what to correct. Candidates with nothing to correct are closed as they are.

    An earlier process may have begun some of them: the store has their corrections.
    """
    names = {_name(maker, one, attempt)[0]: one for one in candidates}
    known: dict[str, CorrectedTurn] = maker.ranks.share(partial(_stored, maker, list(names)))
    new = {name: one for name, one in names.items() if name not in known}
    by_teacher = _by_teacher(maker, spec, new) if spec.by == "teacher" else _by_advice(maker, spec, new)
    known |= by_teacher
    for name, one in names.items():
        if name not in known:
            one.closed = True
    return {name: (names[name], known[name]) for name in names if name in known}


def _stored(maker: BatchMaker, names: Sequence[str]) -> dict[str, CorrectedTurn]:
    entries = maker.store.entries
    known = [name for name in names if name in entries]
    ended = [name for name in known if entries[name].stop is not None]
    begun = [name for name in known if entries[name].stop is None]
    found = [*(maker.store.load(ended) if ended else ()), *(maker.store.partial(begun) if begun else ())]
    facts = {rollout.id: rollout.extras[TAKEOVER] for rollout in found}
    return {
        name: CorrectedTurn(said["turn"], np.array(said["ids"], dtype=np.int32), said["right"], said["wrong"])
        for name, said in facts.items()
    }


def _by_advice(maker: BatchMaker, spec: Takeover, candidates: Mapping[str, Candidate]) -> dict[str, CorrectedTurn]:
    """The first turn that is not in the environment's advice, or the turn that the recipe names, and the best advice for it."""
    found = {}
    for name, one in candidates.items():
        dialogue = maker.rollouter.dialogue(one.visit.prompt)
        texts = texts_of_turns(one.last, dialogue)
        turn = first_wrong(dialogue, one, texts) if spec.turn == "wrong" else spec.turn - 1
        if turn is None or turn >= len(texts):
            continue
        advice = dialogue.environment.advice(one.visit.prompt, texts[:turn])
        if advice:
            found[name] = CorrectedTurn(turn, dialogue.written(advice[0]), advice[0].strip(), texts[turn])
    return found


def first_wrong(dialogue: Dialogue, one: Candidate, texts: Sequence[str]) -> int | None:
    """The first turn that is not in the environment's advice. None: there is no such turn, or no advice."""
    for turn, text in enumerate(texts):
        advice = dialogue.environment.advice(one.visit.prompt, texts[:turn])
        if advice and text not in [right.strip() for right in advice]:
            return turn
    return None


def _by_teacher(maker: BatchMaker, spec: Takeover, candidates: Mapping[str, Candidate]) -> dict[str, CorrectedTurn]:
    """The turns that the teacher writes in the place of each turn, likeliest tokens first; the first that differs is the correction.

    With a turn that the recipe names, it is sampled as the student's turns are.
    """
    asked: dict[str, list[tuple[str, int, SampleRequest]]] = {}
    for name, one in candidates.items():
        requests = asked.setdefault(maker.scorer.teacher_for(one.visit.prompt), [])
        turns = own_turns(one.last)
        wanted = range(len(turns)) if spec.turn == "wrong" else range(spec.turn - 1, min(spec.turn, len(turns)))
        requests += [(name, turn, _request(maker, spec, one, turn, turns[turn][0])) for turn in wanted]
    found: dict[str, CorrectedTurn] = {}
    for teacher, several in asked.items():
        requests_alone = [request for _, _, request in several]
        drawn = answers(maker.samplers.teacher(teacher), requests_alone, maker.rollouter.check_stop) if several else []
        for (name, turn, request), answer in zip(several, drawn, strict=True):
            dialogue = maker.rollouter.dialogue(candidates[name].visit.prompt)
            ids = answer.response_ids[request.start :]
            right, wrong = text_of_turn(ids, dialogue), texts_of_turns(candidates[name].last, dialogue)[turn]
            if name not in found and (spec.turn != "wrong" or right != wrong):
                found[name] = CorrectedTurn(turn, ids, right, wrong)
    return found


def _request(maker: BatchMaker, spec: Takeover, one: Candidate, turn: int, first: int) -> SampleRequest:
    """The request for the teacher's turn after the tokens before a turn."""
    whole, environment = maker.rollouter.sampling, one.visit.prompt.environment
    left = whole.max_new_tokens - first
    sampling: Sampling = replace(whole, max_new_tokens=min(left, environment.turn_tokens or left))
    if spec.turn == "wrong":
        sampling = replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
    name = f"{one.last.id}/{TAKEOVER}-{turn}"
    key = request_key(maker.spec.seed, name, one.visit.visit, turn)
    prefix = one.last.response_ids[:first] if first else None
    return SampleRequest(name, one.last.prompt_ids, key, sampling, prefix_ids=prefix, start=first)


def text_of_turn(ids: np.ndarray, dialogue: Dialogue) -> str:
    return response_text(ids, dialogue.tokenizer, dialogue.stop_ids).strip()


def texts_of_turns(rollout: Rollout, dialogue: Dialogue) -> list[str]:
    return [text_of_turn(rollout.response_ids[first:end], dialogue) for first, end in own_turns(rollout)]


def _planned(maker: BatchMaker, spec: Takeover, one: Candidate, correction: CorrectedTurn, attempt: int) -> Planned:
    """The rollout that begins with the turns before the corrected one."""
    before = own_turns(one.last)[: correction.turn]
    given = [
        GivenTurn(one.last.response_ids[first:end], Author(one.last.author[first]), (one.last, first))
        for first, end in before
    ]
    given.append(GivenTurn(correction.ids, Author.TEACHER))
    key = request_key(maker.spec.seed, one.visit.prompt.id, one.visit.visit, one.first.sample)
    by = spec.by if spec.by == "environment" else maker.scorer.teacher_for(one.visit.prompt)
    writer = StudentWriter() if spec.rest == "student" else TeacherWriter()
    sample = _name(maker, one, attempt)[1]
    extras = {TAKEOVER: correction.facts(one.last, key)}
    return Planned(one.visit, sample, writer, source=f"{TAKEOVER}:{by}", given=GivenTurns(given, key), extras=extras)
