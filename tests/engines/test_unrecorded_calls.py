"""Sampling goes on where its calls cannot be recorded: the same tokens, and one line in the log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from opd.engines.calls import RecordedCalls
from opd.records import Sampling
from tests.support.engines import collect, make_engine, make_requests
from tests.support.helpers import tiny_model

REQUESTS = make_requests((3, 17, 8, 30, 1, 12, 60), Sampling(12, stop_ids=(5,)))


@dataclass
class Again:
    replay: Callable[[], None]


@dataclass
class FailsLater:
    """Records nothing, as there is no device for it; from some recording on it fails."""

    good: int

    def __call__(self, call: Callable[[], None], pool: Any, stream: Any) -> Again:
        self.good -= 1
        if self.good < 0:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nSearch for it")
        return Again(call)


@pytest.mark.parametrize("good", [0, 1, 100])
@torch.inference_mode()
def test_sampling_continues_where_a_recording_fails(good: int, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    expected = collect(make_engine(model), REQUESTS)
    engine = make_engine(model)
    calls = RecordedCalls("tiny", torch.device("cpu"), engine.steps.state, FailsLater(good))
    engine.steps.calls = calls
    assert collect(engine, REQUESTS) == expected
    recorded = sum(graph is not None for graph in calls.graphs.values())
    assert recorded == min(good, len(calls.graphs))
    assert len(calls.graphs) > 2
    lines = [record.getMessage() for record in caplog.records if "cannot be recorded" in record.getMessage()]
    assert len(lines) == (good < 100)
    assert all("not permitted when stream is capturing)" in line for line in lines)


@torch.inference_mode()
def test_errors_of_the_call_itself_are_not_hidden() -> None:
    engine = make_engine(tiny_model("llama"))
    engine.steps.calls = RecordedCalls("tiny", torch.device("cpu"), engine.steps.state, FailsLater(0))

    def fail(*args: Any) -> None:
        raise RuntimeError("out of order")

    engine.model.backbone.layers[0].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of order"):
        collect(engine, REQUESTS)
