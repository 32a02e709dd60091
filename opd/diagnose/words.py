"""A diagnosis as text. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from opd.common.text import bytes_in_words, plain
from opd.diagnose.diagnosis import Diagnosis
from opd.diagnose.measures import AnswerStatistics, PairMeasures
from opd.diagnose.rules import Decision, useful_depth
from opd.report.words import duration
from opd.teachers.table import K

SAYS = {
    "span view": "the tokenizers differ: compare spans",
    "fix the template": "the chat templates differ: fix that first",
    "fix the stops": "the teacher does not stop where its answers end: fix that first",
    "do not": "do not distil",
    "off-policy first": "off-policy first, then on-policy",
    "cold start": "a cold start, then on-policy",
    "sft": "SFT on the teacher's samples",
    "opd": "on-policy distillation",
}


def diagnosis_lines(found: Diagnosis) -> list[str]:
    """A diagnosis as plain text."""
    return [plain(line) for line in _lines(found)]


def _lines(found: Diagnosis) -> Iterator[str]:
    best = {one.domain: one for one in found.advice}
    yield f"student {found.student}"
    for domain, answers in found.students.items():
        yield ""
        yield f"{domain}: the student answers {_answers(answers)}"
        for pair in (pair for pair in found.pairs if pair.domain == domain):
            mark = "*" if pair.teacher == best[domain].pair.teacher and len(best[domain].ranking) > 1 else " "
            yield f"{mark} teacher {pair.teacher} ({found.models[pair.teacher]})"
            yield from (f"    {name:10} {text}" for name, text in _facts(pair) if text)
            yield from (f"    {line}" for line in _verdict(found.decisions[domain, pair.teacher]))
        if len(best[domain].ranking) > 1:
            text = ", ".join(f"{name} {_signed(signal)}" for name, signal in best[domain].ranking)
            yield f"  ranked by signal (take-over advantage × AUROC): {text}"
    yield ""
    yield from _recommended(found)


def _answers(found: AnswerStatistics) -> str:
    text = (
        f"{found.prompts} prompts {found.samples} times, {found.length:.1f} tokens each, {found.truncated:.0%} cut off"
    )
    if found.accuracy is None:
        return f"{text}; not rewarded"
    return f"{text}; {found.accuracy:.0%} ± {found.stderr:.0%} right, pass@{found.samples} {found.pass_at:.0%}"


def _facts(pair: PairMeasures) -> Iterator[tuple[str, str]]:
    yield "same?", _identity(pair)
    yield "gap", _gap(pair)
    yield "thinking", _thinking(pair)
    yield "format", _form(pair)
    yield "prefixes", _prefixes(pair)
    yield "horizon", _horizon(pair)
    yield "stops", _stops(pair)


def _joined(*parts: str | None) -> str:
    return "; ".join(part for part in parts if part)


def _identity(pair: PairMeasures) -> str:
    tokenizer = f"{pair.ids_differ:,} ids of the tokenizers differ" if pair.ids_differ else "same tokenizer"
    return _joined(
        tokenizer,
        None if pair.aligned is None else f"spans pair {pair.aligned:.0%} of the text",
        None if pair.template is None else f"chat template {pair.template:.2g} nats per token",
        None if pair.origin is None else f"weights' cosine {pair.origin:.2f}",
        None if pair.memory is None else bytes_in_words(pair.memory),
    )


def _gap(pair: PairMeasures) -> str:
    answers = pair.answers
    right = None if answers is None or answers.accuracy is None else f"teacher {answers.accuracy:.0%} right"
    gap = None if pair.gap is None else f"gap {pair.gap:+.2f} ± {pair.gap_stderr:.2f}"
    auroc = None if pair.auroc is None else f"within-prompt AUROC {pair.auroc:.2f} over {pair.auroc_pairs:,} pairs"
    words = ", ".join(f"{name} {value:.2f}" for name, value in pair.likelihood.items())
    return _joined(right, gap, auroc, f"nats per token: {words}" if words else None)


def _thinking(pair: PairMeasures) -> str:
    lengths = (
        None if pair.answers is None else f"{pair.answers.length:.1f} tokens, {pair.answers.truncated:.0%} cut off"
    )
    return _joined(
        None if pair.overlap is None else f"overlap@{K} {pair.overlap:.0%}",
        None if pair.overlap_mass is None else f"overlap mass {pair.overlap_mass:.1%}",
        None if pair.kl is None else f"KL {pair.kl:.3f} nats{' (estimated)' if pair.sampled else ''}",
        None if pair.entropy is None else f"entropy {pair.entropy:.2f}, the teacher's {pair.teacher_entropy:.2f}",
        lengths,
    )


def _form(pair: PairMeasures) -> str:
    form = pair.form
    if form is None:
        return ""
    marks = (f"{name} in {ours:.0%}, the teacher's {theirs:.0%}" for name, (ours, theirs) in form.marks.items())
    lines = f"{form.lines[0]:.1f} lines, the teacher's {form.lines[1]:.1f}"
    return _joined(f"{form.opening:.0%} of the answers begin alike", lines, *marks)


def _prefixes(pair: PairMeasures) -> str:
    taken = ", ".join(f"{depth.advantage:+.2f} after {depth.depth}" for depth in pair.takeover)
    noise = useful_depth(pair.takeover)
    forks, errors = pair.forks, pair.errors
    return _joined(
        f"taking over gains {taken} tokens" if taken else None,
        None if noise is None else f"noise from token {noise} on",
        None if forks.here is None else f"advantage {forks.here:+.2f} at forks, {_signed(forks.elsewhere)} elsewhere",
        None if errors.here is None else f"surprise {errors.here:.2f} after errors, {_number(errors.elsewhere)} before",
    )


def _horizon(pair: PairMeasures) -> str:
    if pair.excess is None:
        return ""
    by = ", ".join(f"{_number(part.kl)}/{_number(part.kl_teacher)}" for part in pair.stretches if part.kl is not None)
    return f"KL {pair.excess:+.0%} after the student's words relative to the teacher's; by position {by}"


def _stops(pair: PairMeasures) -> str:
    stops = pair.stops
    ids = None
    if pair.stop_ids is not None:
        same = set(pair.stop_ids[0]) == set(pair.stop_ids[1])
        ids = (
            "same ids"
            if same
            else f"other ids ({_ids(pair.stop_ids[1])}, the student {_ids(pair.stop_ids[0])}): one event"
        )
    return _joined(
        ids,
        None if stops.own is None else f"mass {stops.own:.2f} at its own ends",
        None
        if stops.reference is None
        else f"{stops.reference:.2f} at the {'dataset' if stops.given else 'student'}'s",
        None if stops.student is None else f"ends at {stops.student:.0%} of {stops.ends} ends of the student",
    )


def _ids(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids)) or "none"


def _verdict(decision: Decision) -> Iterator[str]:
    rule = decision.rule
    yield f"verdict    {rule.verdict.upper()}: {decision.because} (rule {rule.number}, {rule.evidence})"
    yield f"remedy     {rule.remedy}"
    for one, because in decision.refined:
        yield f"and        {because}: {one.remedy} (rule {one.number}, {one.evidence})"


def _recommended(found: Diagnosis) -> Iterator[str]:
    what = found.recommendation
    yield f"recommended: {SAYS[what.verdict]}"
    yield from (f"  {domain} from {teacher}" for domain, teacher in what.teachers.items())
    yield from (f"  {domain}: left out, {why}" for domain, why in what.left_out.items())
    yield from (f"  {reason}" for reason in what.reasons if reason.startswith(("objective", "rollouts")))
    yield from (f"  {line}" for line in found.plan)
    if found.seconds is not None:
        yield f"  time       about {duration(found.seconds)} of training on this machine, estimated from the sampling and scoring above"
    yield from (f"note: {note}" for note in found.notes)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _signed(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}"
