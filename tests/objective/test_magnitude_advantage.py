"""RLSD's advantage: the verifier gives the direction, the teacher how far each token goes."""

from __future__ import annotations

from math import exp
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from opd.objective.advantages import MagnitudeAdvantage, SampledTokens, weighed_by_teacher
from opd.objective.batch import Batch
from opd.objective.objective import prepare_term
from opd.records import Signal, SignalNeed
from opd.teachers.scoring import LocalTeacher
from tests.support.helpers import term, tiny_model
from tests.support.rollouts import STOPS, sampled_by, some_rollouts
from tests.support.steps import gradients


def plain(advantage: float, teacher: float, student: float, share: float, band: float) -> float:
    """As published (arXiv 2604.03128, equations 14 to 16), one token."""
    sign = (advantage > 0) - (advantage < 0)
    weight = min(max(exp(min(sign * (teacher - student), 700)), 1 - band), 1 + band)
    return advantage * ((1 - share) + share * weight)


@given(
    advantage=st.floats(-3, 3),
    teacher=st.floats(-800, 0),
    student=st.floats(-800, 0),
    share=st.floats(0, 1),
    band=st.floats(0.01, 0.9),
)
def test_the_formula_in_double_precision(
    advantage: float, teacher: float, student: float, share: float, band: float
) -> None:
    found = weighed_by_teacher(np.array([advantage]), np.array([teacher - student]), share, band)
    assert found[0] == pytest.approx(plain(advantage, teacher, student, share, band), rel=1e-12, abs=1e-15)
    assert found[0] * advantage >= 0  # the teacher never turns the direction


def test_share_rises_and_falls() -> None:
    rising = MagnitudeAdvantage(share=0.8, warmup=4, decay=2)
    assert [rising.share_at(step) for step in range(1, 9)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.4, 0, 0, 0])
    assert MagnitudeAdvantage(share=0.3).share_at(1) == MagnitudeAdvantage(share=0.3).share_at(99) == 0.3
    for wrong in ({"share": 0}, {"outcome_weight": 0}, {"band": 1.0}):
        with pytest.raises(ValidationError):
            MagnitudeAdvantage(**wrong)  # type: ignore[arg-type]


def test_a_term_weighs_the_outcome_of_whole_answers() -> None:
    student, teacher = tiny_model("llama"), tiny_model("llama", 1)
    rollouts = sampled_by(student, some_rollouts())
    rewards = {item.id: float(number % 3 == 0) for number, item in enumerate(rollouts)}
    also: Any = {"kind": "magnitude", "share": 0.6, "band": 0.3, "std": True, "warmup": 2}
    weighed = term(form="policy_gradient", aggregate="constant", advantage={"teacher_weight": 0, "also": also})
    found, _, _ = gradients(student, {"t": teacher}, [weighed], rollouts, scores=rewards)

    scores = LocalTeacher("t", "teacher", teacher, 64, STOPS).score(rollouts, SignalNeed("logprobs_at"))
    wanted = 0.0
    for item, signal in zip(rollouts, scores, strict=True):
        group = np.array([rewards[other.id] for other in rollouts if other.group == item.group])
        spread = group.std(ddof=1) if group.size > 1 else 0.0
        advantage = float((rewards[item.id] - group.mean()) / (spread + 1e-4))
        for said, own in zip(signal.values, item.logprob, strict=True):  # the first of two warm-up steps: half of 0.6
            wanted -= plain(advantage, float(said), float(own), 0.3, 0.3)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert weighed.needs().rewards
    assert weighed.needs().signals == (("teacher", "logprobs_at"),)
    assert weighed.minimises == ""


def test_tokens_of_a_span_are_compared_as_one_event() -> None:
    """With another tokenizer the teacher's log-prob of a span is divided over its tokens, so the student's is as well."""
    (one, *_) = sampled_by(tiny_model("llama"), some_rollouts(count=1))
    size = one.response_ids.size
    said = np.full(size, float(one.logprob.mean()) + 0.1)
    signal = Signal(
        "t", 0, "teacher", "bytes", ((0, size, 1, 2),), said, np.ones(size, dtype=bool), crossed=np.zeros(1)
    )
    weighed = term(
        form="policy_gradient", advantage={"teacher_weight": 0, "also": {"kind": "magnitude", "baseline": "none"}}
    )
    batch = Batch([one], {("teacher", "logprobs_at"): {one.id: signal}}, {one.id: 1.0})
    prepared = prepare_term(weighed, "0", 1.0, batch, 99, 0)
    tokens = SampledTokens(weighed, prepared, [one], [one.logprob.astype(np.float64)])
    (values,) = weighed.advantage.values(tokens, prepared.state)
    assert size > 1
    assert values == pytest.approx(np.full(size, 0.5 + 0.5 * exp(0.1)), rel=1e-6)
