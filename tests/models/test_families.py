"""Every family of models, tiny: scored alone and packed, trained, sampled, saved, with LoRA; or rejected in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from opd.common.errors import ModelError
from opd.divergences import divergence
from opd.engines.builtin import open_sampler
from opd.engines.kinds import BuiltInSampler
from opd.models import load_model
from opd.models.attention import Packed
from opd.models.language_model import LanguageModel
from opd.models.load import untrained_parameters
from opd.recipe import Lora
from opd.records import Rollout, SampleRequest, Sampling, TokenSampler
from opd.rollouts.rollouter import answers
from tests.support.families import FAMILIES, Family, family_named, load_family, page_rows, row
from tests.support.helpers import EOS

LENGTHS = [13, 5, 30, 18]
PROMPTS = (3, 9)
NEW = 10


def test_the_page_lists_every_family() -> None:
    """The rows themselves are compared below, family by family."""
    assert [cells[0] for cells in page_rows()] == [family.name for family in FAMILIES]
    assert len(FAMILIES) >= 55


@pytest.mark.families
@pytest.mark.parametrize("family", [f for f in FAMILIES if not f.rejected], ids=lambda family: family.name)
def test_a_family_is_scored_trained_sampled_and_saved_as_stock_does(family: Family, tmp_path: Path) -> None:
    student, teacher = load_family(family, tmp_path / "model"), load_model(str(tmp_path / "model"))
    stock = stock_of(tmp_path / "model", student)
    sequences = ids_of(LENGTHS)
    expected = [logits_of(stock, ids, student.size) for ids in sequences]

    packed = logits(student, sequences).split(LENGTHS)
    for ids, together, wanted in zip(sequences, packed, expected, strict=True):
        close(together, wanted)
        close(logits(student, [ids]), wanted)

    assert_no_divergence(student, teacher, sequences)
    sampler = open_sampler(student.inference_copy(), BuiltInSampler(slots=4), 64, merge_stop=(EOS,))
    assert_sampled_as_generated(sampler, stock, student.size, family.generates_with_cache)

    train_one_step(student, sequences)
    sampler.load(student.weights(1))
    student.save(tmp_path / "trained")
    again = load_model(str(tmp_path / "trained"))
    trained = logits(student, sequences)
    torch.testing.assert_close(logits(again, sequences), trained, rtol=0, atol=0)
    assert float((trained - torch.cat(expected)).abs().max()) > 1e-3
    rollout = answers(sampler, requests(1.0))[1]
    assert_logprobs(rollout, stock_of(tmp_path / "trained", student), student.size)
    assert set(rollout.version.tolist()) == {1}

    listed = [cells[:5] for cells in page_rows()]  # the reason is worded by the versions the page was written with
    assert row(family, teacher)[:5] in listed, "write the page again: python -m tests.support.families"


@pytest.mark.families
@pytest.mark.parametrize("family", [f for f in FAMILIES if not f.rejected], ids=lambda family: family.name)
def test_the_parameters_that_get_no_gradient_are_those_that_are_reported(family: Family) -> None:
    assert_told(family)


@pytest.mark.parametrize("name", ["Llama", "DeepSeek-V3.2", "GLM-MoE-DSA", "AFMoE"])
def test_indexers_and_routing_biases_that_get_no_gradient_are_reported(name: str) -> None:
    family = family_named(name)
    assert_told(family)
    assert bool(untrained_parameters(family.build())) == (name != "Llama")


def assert_told(family: Family) -> None:
    module = family.build().requires_grad_(True)
    module(input_ids=ids_of([40])[0][None], use_cache=False).logits.square().sum().backward()
    assert set(untrained_parameters(module)) == {key for key, value in module.named_parameters() if value.grad is None}


@pytest.mark.families
@pytest.mark.parametrize("family", [f for f in FAMILIES if not f.rejected], ids=lambda family: family.name)
def test_a_family_with_lora_samples_and_saves_what_it_trains(family: Family, tmp_path: Path) -> None:
    model = load_family(family, tmp_path / "model")
    if next(cells for cells in page_rows() if cells[0] == family.name)[4] == "rejected":
        with pytest.raises(ModelError) as error:
            model.add_lora(Lora(rank=2))
        assert one_sentence(error.value)
        return
    model.add_lora(Lora(rank=2))
    sequences = ids_of(LENGTHS)
    before = logits(model, sequences)
    train_one_step(model, sequences)
    adapted = logits(model, sequences)
    assert float((adapted - before).abs().max()) > 1e-3
    model.save(tmp_path / "trained")
    close(logits(load_model(str(tmp_path / "trained")), sequences), adapted)
    sampler = open_sampler(model.inference_copy(), BuiltInSampler(slots=4), 64, merge_stop=(EOS,))
    sampler.load(model.weights(1))
    rollout = answers(sampler, requests(1.0))[0]
    assert_logprobs(rollout, stock_of(tmp_path / "trained", model), model.size)


@pytest.mark.families
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.rejected], ids=lambda family: family.name)
def test_a_family_that_cannot_be_used_is_rejected_in_one_sentence(family: Family, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=family.rejected) as error:
        load_family(family, tmp_path / "model")
    assert one_sentence(error.value)
    assert row(family, error.value) in page_rows(), "write the page again: python -m tests.support.families"


# What is compared


def stock_of(directory: Path, model: LanguageModel) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation=model.own_attention)


def ids_of(lengths: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 70, (length,), generator=generator) for length in lengths]


def logits(model: LanguageModel, sequences: list[Tensor]) -> Tensor:
    layout = Packed.of([ids.numel() for ids in sequences])
    with torch.no_grad():
        return model.project(model.hidden(torch.cat(sequences), layout)).logits()


def logits_of(stock: Any, ids: Tensor, size: int) -> Tensor:
    with torch.no_grad():
        return stock(input_ids=ids[None], use_cache=False).logits[0, :, :size]


def close(ours: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=2e-4)


def assert_no_divergence(student: LanguageModel, teacher: LanguageModel, sequences: list[Tensor]) -> None:
    """Student = teacher: KL 0 and gradient 0, with the student packed otherwise than the teacher."""
    layout = Packed.of([ids.numel() for ids in sequences])
    judged = torch.cat([teacher_hidden(teacher, ids) for ids in sequences])
    hidden = student.hidden(torch.cat(sequences), layout)
    found = divergence("reverse_kl", student.project(hidden), teacher.project(judged), merge=((EOS,),))
    assert float(found.value.abs().max()) < 1e-5
    found.loss.backward()
    gradients = [parameter.grad for parameter in student.module.parameters() if parameter.grad is not None]
    assert gradients
    assert max(float(gradient.abs().max()) for gradient in gradients) < 2e-2
    student.module.zero_grad()


def teacher_hidden(teacher: LanguageModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return teacher.hidden(ids, Packed.of([ids.numel()]))


def train_one_step(model: LanguageModel, sequences: list[Tensor]) -> None:
    """Cross-entropy of made-up targets falls, and the gradient is finite."""
    optimiser = torch.optim.AdamW(model.trainable().values(), lr=1e-2)
    layout, ids = Packed.of([ids.numel() for ids in sequences]), torch.cat(sequences)

    def loss() -> Tensor:
        return -model.project(model.hidden(ids, layout)).logits().log_softmax(-1)[:, 5].mean()

    first = loss()
    first.backward()
    norms = [parameter.grad.norm() for parameter in model.trainable().values() if parameter.grad is not None]
    assert norms
    assert torch.isfinite(torch.stack(norms)).all()
    for _ in range(2):
        optimiser.step()  # LoRA's second factor starts at 0, so its first step moves nothing but that
        optimiser.zero_grad()
        later = loss()
        later.backward()
    assert float(later) < float(first)


def requests(temperature: float, prefix: np.ndarray | None = None) -> list[SampleRequest]:
    sampling = Sampling(NEW, temperature, stop_ids=(EOS,))
    prompts = [ids.numpy().astype(np.int32) for ids in ids_of(list(PROMPTS), seed=1)]
    return [SampleRequest(f"r{key}", ids, key, sampling, prefix) for key, ids in enumerate(prompts)]


def assert_sampled_as_generated(sampler: TokenSampler, stock: Any, size: int, cached: bool) -> None:
    for rollout in answers(sampler, requests(0.0)):
        ids = torch.from_numpy(rollout.prompt_ids.astype(np.int64))[None]
        padding = list(range(size, stock.config.vocab_size))
        generated = stock.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, suppress_tokens=padding,
            eos_token_id=EOS, pad_token_id=EOS, use_cache=cached,
        )  # fmt: skip
        assert generated[0, ids.shape[1] :].tolist() == rollout.response_ids.tolist()
    drawn = answers(sampler, requests(1.0))
    for rollout in drawn:
        assert_logprobs(rollout, stock, size)
    first = drawn[1]
    half = first.response_ids[: first.response_ids.size // 2]
    continued = answers(sampler, [requests(1.0, half)[1]])[0]
    assert continued.response_ids.tolist() == first.response_ids.tolist()
    np.testing.assert_allclose(continued.logprob[half.size :], first.logprob[half.size :], atol=1e-3)


def assert_logprobs(rollout: Rollout, stock: Any, size: int) -> None:
    """Each token under the stock forward pass of what stood before it."""
    ids = torch.from_numpy(np.concatenate([rollout.prompt_ids, rollout.response_ids]).astype(np.int64))
    for at, token in enumerate(rollout.response_ids.tolist()):
        before = ids[: rollout.prompt_ids.size + at]
        expected = logits_of(stock, before, size)[-1].log_softmax(-1)
        assert rollout.logprob[at] == pytest.approx(float(expected[token]), abs=1e-3)
        assert rollout.logprob_stop[at] == pytest.approx(float(expected[EOS]), abs=1e-3)


def one_sentence(error: BaseException) -> bool:
    return "\n" not in str(error) and str(error).count(". ") <= 1
