"""The measurements of a diagnosis, and how values per token become values per pair of models. No torch here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

OPENING = 12  # letters of an answer that are its opening
MARKS = {  # of a format
    "thinking": r"</?think",
    "\\boxed": r"\\boxed",
    "####": r"^####",
    "code": r"```",
    "list": r"^\s*(?:[-*•]|\d+[.)])\s",
    "heading": r"^#{1,3} ",
    "bold": r"\*\*",
    "JSON": r"^\s*[{\[]\s*\"",
}
BINS = 8  # parts that an answer is split into
FORK = 0.8  # quantile of the student's entropy above which a token is a fork


class Depth(NamedTuple):
    """The gain if the teacher takes over after so many tokens of the student's answers."""

    depth: int
    answers: int
    advantage: float  # accuracy of the teacher's continuations minus the student's accuracy
    stderr: float


class Stretch(NamedTuple):
    """Tokens start … end - 1 of the student's answers."""

    start: int
    end: int
    tokens: int
    surprise: float  # of the teacher: -log-prob
    advantage: float  # its log-prob minus the student's
    kl: float | None  # nats, student to teacher, after the student's own words
    kl_teacher: float | None  # after the teacher's words
    auroc: float | None  # of the mean advantage here: right answers of a prompt against wrong ones


class HereAndElsewhere(NamedTuple):
    """A value at some tokens, compared with all others."""

    here: float | None
    elsewhere: float | None


NO_CONTRAST = HereAndElsewhere(None, None)


class Form(NamedTuple):
    """The form of answers: student and teacher."""

    opening: float  # overlap of the two distributions of openings
    lines: tuple[float, float]  # of an answer, student and teacher
    marks: Mapping[str, tuple[float, float]]  # share of answers with each mark that occurs


@dataclass(frozen=True)
class AnswerStatistics:
    """How a model answers the prompts of a domain, drawn at temperature 1."""

    prompts: int
    samples: int  # of each prompt
    length: float
    longest: int
    truncated: float  # share cut off at the limit
    accuracy: float | None = None
    stderr: float | None = None
    pass_at: float | None = None  # at least one of all samples is right
    by_prompt: Mapping[str, float] = field(default_factory=dict, repr=False)  # share of right ones

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        del found["by_prompt"]
        return found


@dataclass(frozen=True)
class StopProbe:
    """Whether teacher and student agree on where an answer ends. Ids of all are one event."""

    own: float | None = None  # its probability of ending where its own answers end; 0 for answers that never end
    reference: float | None = None  # where the dataset's answers end; if it has none, the student's
    student: float | None = (
        None  # share of the student's (right) ends where it would end as well (probability above one half)
    )
    ends: int = 0  # of the student that were looked at
    instead: tuple[int, str, float] | None = None  # id, text and probability of what it says at the end instead
    given: bool = True  # the dataset has answers


@dataclass(frozen=True)
class PairMeasures:
    """One teacher compared with the student in one domain. None: not known."""

    teacher: str
    domain: str
    tokens: int = 0  # of the student's that were scored
    ids_differ: int = 0
    crosses: bool = False  # the recipe has it read its own tokens already
    aligned: float | None = None  # share of the text that spans pair, where tokenizers differ
    template: float | None = None  # nats per token that its own chat template would change
    own_template: float | None = None  # its accuracy with that template, if it differs
    stop_ids: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # of student and teacher
    origin: float | None = None  # cosine between weights
    memory: int | None = None
    answers: AnswerStatistics | None = None  # of the teacher
    gap: float | None = None
    gap_stderr: float | None = None
    auroc: float | None = None  # within prompts, of the mean log-ratio: right answers against wrong ones
    auroc_pairs: int = 0
    likelihood: Mapping[str, float] = field(default_factory=dict)  # nats per token: whose words under whom
    kl: float | None = None
    sampled: bool = False  # the KL is an estimate from log-probs
    overlap: float | None = None
    overlap_mass: float | None = None
    entropy: float | None = None
    teacher_entropy: float | None = None
    form: Form | None = None
    stretches: tuple[Stretch, ...] = ()
    forks: HereAndElsewhere = NO_CONTRAST  # advantage where the student hesitates
    errors: HereAndElsewhere = NO_CONTRAST  # surprise after the worst token of wrong answers, and before it
    takeover: tuple[Depth, ...] = ()
    excess: float | None = None  # KL after the student's words divided by KL after the teacher's words, minus 1
    stops: StopProbe = field(default_factory=StopProbe)

    @property
    def signal(self) -> float | None:
        """The rank of a teacher: the mean take-over advantage, times the AUROC if the advantage is positive."""
        if not self.takeover or self.auroc is None:
            return None
        advantage = float(np.mean([depth.advantage for depth in self.takeover]))
        return advantage * self.auroc if advantage > 0 else advantage

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        found["answers"] = None if self.answers is None else self.answers.to_json()
        for name in ("stretches", "takeover"):
            found[name] = [part._asdict() for part in getattr(self, name)]
        for name in ("forks", "errors"):
            found[name] = getattr(self, name)._asdict()
        found["form"] = None if self.form is None else self.form._asdict()
        return found | {"signal": self.signal}


def answers_of(
    prompt_ids: Sequence[str], marks: np.ndarray, lengths: Sequence[int], truncated: Sequence[bool], samples: int
) -> AnswerStatistics:
    by_prompt: dict[str, list[float]] = {}
    for name, mark in zip(prompt_ids, marks, strict=True):
        if not np.isnan(mark):
            by_prompt.setdefault(name, []).append(float(mark))
    shares = {name: float(np.mean(found)) for name, found in by_prompt.items()}
    values = np.array(list(shares.values()))
    return AnswerStatistics(
        prompts=len(set(prompt_ids)),
        samples=samples,
        length=float(np.mean(lengths)),
        longest=max(lengths),
        truncated=float(np.mean(truncated)),
        accuracy=float(values.mean()) if values.size else None,
        stderr=_stderr(values) if values.size else None,
        pass_at=float((values > 0).mean()) if values.size else None,
        by_prompt=shares,
    )


def gap_between(student: AnswerStatistics, teacher: AnswerStatistics | None) -> tuple[float | None, float | None]:
    """The teacher's accuracy minus the student's over the prompts that both answered, and its standard error."""
    shared = [] if teacher is None else [name for name in student.by_prompt if name in teacher.by_prompt]
    if teacher is None or not shared:
        return None, None
    differences = np.array([teacher.by_prompt[name] - student.by_prompt[name] for name in shared])
    return float(differences.mean()), _stderr(differences)


def form_of(student: Sequence[str], teacher: Sequence[str]) -> Form | None:
    """
    >>> form_of(["12", "3 4"], ["12", "So: **7**\\nDone."])
    Form(opening=0.5, lines=(1.0, 1.5), marks={'bold': (0.0, 0.5)})
    """
    if not student or not teacher:
        return None
    sides = student, teacher
    openings = [Counter(map(_opening, texts)) for texts in sides]
    alike = sum(min(openings[0][one] / len(student), openings[1][one] / len(teacher)) for one in openings[0])
    lines = [float(np.mean([text.strip().count("\n") + 1 for text in texts])) for texts in sides]
    shares = {
        name: [float(np.mean([re.search(pattern, text, re.M) is not None for text in texts])) for texts in sides]
        for name, pattern in MARKS.items()
    }
    return Form(
        alike, (lines[0], lines[1]), {name: (ours, theirs) for name, (ours, theirs) in shares.items() if ours or theirs}
    )


def _opening(text: str) -> str:
    """The pattern of an opening: words and numbers by kind, other characters unchanged."""
    return re.sub(r"[^\W\d_]+", "a", re.sub(r"\d+", "0", text.strip()[:OPENING]))


def _stderr(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else 0.0


def within_prompt_auroc(prompt_ids: Sequence[str], marks: np.ndarray, scores: np.ndarray) -> tuple[float | None, int]:
    """The chance that of a right and a wrong answer to one prompt the right one scores higher, and the number of pairs.

    >>> within_prompt_auroc(["a", "a", "b"], np.array([1.0, 0.0, 1.0]), np.array([0.2, 0.1, 9.0]))
    (1.0, 1)
    """
    names = np.array(prompt_ids)
    won, pairs = 0.0, 0
    for name in dict.fromkeys(prompt_ids):
        own = (names == name) & ~np.isnan(scores)
        right, wrong = scores[own & (marks == 1)], scores[own & (marks == 0)]
        above = (right[:, None] > wrong[None, :]).sum() + 0.5 * (right[:, None] == wrong[None, :]).sum()
        won, pairs = won + float(above), pairs + right.size * wrong.size
    return (won / pairs if pairs else None), pairs


def mean_of(values: Sequence[np.ndarray]) -> float | None:
    """The mean over all known tokens."""
    whole = np.concatenate(values) if values else np.zeros(0)
    known = whole[~np.isnan(whole)]
    return float(known.mean()) if known.size else None


def stretch_edges(lengths: Sequence[int]) -> list[int]:
    """Boundaries of at most BINS parts of about equal length."""
    longest = max(lengths, default=0)
    count = min(BINS, longest)
    return sorted({round(longest * part / count) for part in range(count + 1)}) if count else []


def excess_kl(student: Sequence[np.ndarray], teacher: Sequence[np.ndarray]) -> float | None:
    """How much larger the KL is after the student's words than after the teacher's, per position.

    The first position follows only the prompt in both cases, and is left out.
    """
    ours, theirs = _by_position(student), _by_position(teacher)
    shared = [at for at in ours if at and at in theirs]
    weights = [ours[at].size for at in shared]
    own = sum(weight * float(ours[at].mean()) for weight, at in zip(weights, shared, strict=True))
    other = sum(weight * float(theirs[at].mean()) for weight, at in zip(weights, shared, strict=True))
    return own / other - 1 if other > 0 else None


def _by_position(values: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
    found: dict[int, list[float]] = {}
    for row in values:
        for at, value in enumerate(row):
            if not np.isnan(value):
                found.setdefault(at, []).append(float(value))
    return {at: np.array(some) for at, some in found.items()}


def inside(values: Sequence[np.ndarray], start: int, end: int) -> list[np.ndarray]:
    return [row[start:end] for row in values]


def fork_places(entropy: Sequence[np.ndarray], advantage: Sequence[np.ndarray]) -> HereAndElsewhere:
    """The advantage at the student's forks, and elsewhere."""
    every = np.concatenate(entropy) if entropy else np.zeros(0)
    if not (~np.isnan(every)).any():
        return NO_CONTRAST
    limit = float(np.nanquantile(every, FORK))
    return HereAndElsewhere(
        mean_of([row[known > limit] for row, known in zip(advantage, entropy, strict=True)]),
        mean_of([row[known <= limit] for row, known in zip(advantage, entropy, strict=True)]),
    )


def error_places(
    marks: np.ndarray, advantage: Sequence[np.ndarray], surprise: Sequence[np.ndarray]
) -> HereAndElsewhere:
    """In wrong answers: the teacher's surprise after its least likely token, and before it."""
    after, before = [], []
    for mark, ratio, row in zip(marks, advantage, surprise, strict=True):
        if mark == 0 and (~np.isnan(ratio)).any():
            worst = int(np.nanargmin(ratio))
            after.append(row[worst + 1 :])
            before.append(row[:worst])
    return HereAndElsewhere(mean_of(after), mean_of(before))
