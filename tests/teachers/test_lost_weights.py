"""The probe: a teacher that lost its weights is told from one that has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from opd.common.errors import TrainingError
from opd.teachers.pool import Probe, probe_rollouts
from opd.teachers.scoring import LocalTeacher
from tests.support.helpers import tiny_model


def opened(seed: int = 0) -> LocalTeacher:
    model = tiny_model(seed=seed)
    return LocalTeacher("maths", "teacher", model, 8192, model.stop_ids)


def test_a_probe_is_always_the_same_and_has_no_stop_id() -> None:
    first, again = probe_rollouts(78, (1, 5)), probe_rollouts(78, (1, 5))
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one.prompt_ids, other.prompt_ids)
        assert np.array_equal(one.response_ids, other.response_ids)
    ids = np.concatenate([part for one in first for part in (one.prompt_ids, one.response_ids)])
    assert not set(ids.tolist()) & {1, 5}
    assert 0 <= ids.min() <= ids.max() < 78
    assert len(set(ids.tolist())) > 10


def test_the_same_weights_pass_and_any_change_is_named() -> None:
    teacher = opened()
    probe = Probe(teacher, teacher.model.size, avoid=teacher.stop_ids)
    probe.check(teacher)
    weight = teacher.model.module.model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():
        weight[0, 0] += 1e-2
    with pytest.raises(TrainingError, match=r"'maths' is not the one that was opened.* had log-prob -\d.*now has -\d"):
        probe.check(teacher)
    Probe(opened(), teacher.model.size, avoid=teacher.stop_ids, tolerance=1.0).check(teacher)  # within what is allowed
    with pytest.raises(TrainingError, match="allowed difference 1e-09"):
        Probe(opened(), teacher.model.size, avoid=teacher.stop_ids, tolerance=1e-9).check(teacher)
    with torch.no_grad():
        teacher.model.module.model.norm.weight.fill_(
            float("nan")
        )  # attention on some CPUs takes NaN queries for masked ones
    with pytest.raises(TrainingError, match="now has nan"):
        Probe(opened(), teacher.model.size, avoid=teacher.stop_ids, tolerance=1.0).check(teacher)


def test_a_teacher_without_weights_is_rejected_when_it_is_opened() -> None:
    teacher = opened()
    with torch.no_grad():
        for parameter in teacher.model.module.parameters():
            parameter.zero_()
    with pytest.raises(TrainingError, match=r"'maths' answers -4\.3\d* for every token"):
        Probe(teacher, teacher.model.size, avoid=teacher.stop_ids)
    with torch.no_grad():
        for parameter in teacher.model.module.parameters():
            parameter.fill_(float("nan"))
    with pytest.raises(TrainingError, match="21 of 21 log-probs of a fixed probe are not finite"):
        Probe(teacher, teacher.model.size, avoid=teacher.stop_ids)
