"""Caches that give other log-probs than the pass that trains, by a little more with every token: they are not used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from opd.engines.builtin import DRIFT, PlainSampler, Reader, small_steps
from opd.models import load_model
from opd.models.language_model import LanguageModel
from opd.records import SampleRequest, Sampling
from opd.rollouts.rollouter import answers
from tests.support.families import family_named
from tests.support.helpers import EOS, tiny_tokenizer

DRIFTING, RIGHT = ("Nemotron-H", "Zamba 2"), ("Bamba", "Falcon-H1", "Mamba 2", "Granite-4 hybrid", "Qwen3.5", "Jamba")
IDS = torch.randint(2, 70, (60,), generator=torch.Generator().manual_seed(0)).tolist()


def load(name: str, directory: Path, step: float | None = None, dtype: str = "float32") -> LanguageModel:
    """`step`: the bias of every other head's step, before softplus."""
    module = family_named(name).build()
    for key, parameter in module.named_parameters():
        if key.endswith("dt_bias") and step is not None:
            parameter.data[::2] = step
    module.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return load_model(str(directory), dtype=dtype)


def drift(sampler: PlainSampler) -> float:
    """Of the model's own cache, used or not."""
    whole, stepwise = Reader(sampler, cached=False).read_all(IDS), Reader(sampler, cached=True)
    stepwise.read(IDS[:5])
    gaps = [
        stepwise.read(IDS[:length]).log_softmax(-1) - whole[length - 1].log_softmax(-1)
        for length in range(6, len(IDS) + 1)
    ]
    return float(torch.stack(gaps).abs().max())


@pytest.mark.parametrize("name", DRIFTING)
def test_a_cache_that_drifts_is_not_used_and_sampled_log_probs_are_those_that_train(name: str, tmp_path: Path) -> None:
    sampler = PlainSampler(load(name, tmp_path, step=-9.0), 128, merge_stop=(EOS,))
    assert drift(sampler) > 5 * DRIFT  # otherwise transformers has put it right, and the list above is out of date
    assert not sampler.cached
    assert "reading the whole sequence" in sampler.why_slow
    prompt = np.array(IDS[:9], dtype=np.int32)
    (rollout,) = answers(sampler, [SampleRequest("r", prompt, 0, Sampling(40, 1.0, stop_ids=()), None)])
    ids = [*IDS[:9], *rollout.response_ids.tolist()]
    whole = Reader(sampler, cached=False).read_all(ids).log_softmax(-1)
    wanted = [float(whole[8 + at, token]) for at, token in enumerate(rollout.response_ids.tolist())]
    np.testing.assert_allclose(rollout.logprob, wanted, atol=1e-4)


@pytest.mark.parametrize("name", DRIFTING)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_found_whatever_the_weights_are_and_in_half_precision(name: str, dtype: str, tmp_path: Path) -> None:
    """Weights whose steps are all large do not show it, and training may make them small."""
    sampler = PlainSampler(load(name, tmp_path, step=0.0, dtype=dtype), 128, merge_stop=(EOS,))
    assert not sampler.cached


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_caches_that_are_right_are_used(name: str, dtype: str, tmp_path: Path) -> None:
    sampler = PlainSampler(load(name, tmp_path, step=-9.0, dtype=dtype), 128, merge_stop=(EOS,))
    assert sampler.cached
    if dtype == "float32":
        assert drift(sampler) < DRIFT / 10


def test_the_check_leaves_every_tensor_as_it_was(tmp_path: Path) -> None:
    module = load("Nemotron-H", tmp_path).module
    before = dict(module.named_parameters())
    values = {name: parameter.clone() for name, parameter in before.items()}
    with small_steps(module):
        inside = dict(module.named_parameters())
        assert any(inside[name] is not parameter for name, parameter in before.items())
        assert all(torch.equal(before[name], value) for name, value in values.items())
    after = dict(module.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
