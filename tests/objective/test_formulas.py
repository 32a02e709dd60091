"""The mathematics, in fp64: definitions against finite differences, fast paths against definitions."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from opd.divergences import Projection, divergence, teacher_log_ratio, token_logprobs
from opd.divergences.projection import log_probs
from opd.models.language_model import Pack
from opd.objective.micro import MicroBatch, TokenStatistics
from opd.objective.policy_gradient import importance_sampling
from opd.objective.term import token_weights
from tests.support.servers import rollouts

KINDS: list[tuple[str, dict[str, float]]] = [
    ("reverse_kl", {}),
    ("forward_kl", {}),
    ("jsd", {"beta": 0.5}),
    ("jsd", {"beta": 0.1}),
    ("jsd", {"beta": 0.0}),
    ("jsd", {"beta": 1.0}),
]


def heads(
    seed: int,
    n: int = 5,
    vocabulary: int = 9,
    bias: bool = True,
    softcap: float | None = None,
    teacher_size: int | None = None,
) -> tuple[Projection, Projection]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    student = Projection(
        draw(n, 4).requires_grad_(),
        draw(vocabulary, 4).requires_grad_(),
        draw(vocabulary).requires_grad_() if bias else None,
        1.3,
        softcap,
    )
    return student, Projection(draw(n, 6), draw(vocabulary + 2, 6), None, 0.7, None, teacher_size)


def leaves(projection: Projection) -> list[Tensor]:
    return [leaf for leaf in (projection.hidden, projection.weight, projection.bias) if leaf is not None]


def plain_value(kind: str, params: dict[str, float], student: np.ndarray, teacher: np.ndarray) -> np.ndarray:
    """The textbook sums on plain probabilities."""

    def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
        return np.where(p > 0, p * np.log(np.maximum(p, 1e-300) / np.maximum(q, 1e-300)), 0).sum(-1)

    beta = params.get("beta")
    if kind == "reverse_kl" or beta == 1.0:
        return kl(student, teacher)
    if kind == "forward_kl" or beta == 0.0:
        return kl(teacher, student)
    assert beta is not None
    mixture = beta * teacher + (1 - beta) * student
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


@pytest.mark.parametrize(("kind", "params"), KINDS)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    softcap=st.sampled_from([None, 2.0]),
    merged=st.booleans(),
)
def test_value_is_the_textbook_sum(
    kind: Any, params: dict, seed: int, temperature: float, softcap: float | None, merged: bool
) -> None:
    student, teacher = heads(seed, softcap=softcap, teacher_size=8)
    merge = ((1, 3, 5),) if merged else ()
    found = divergence(kind, student, teacher, temperature=temperature, merge=merge, **params)

    def probabilities(projection: Projection) -> np.ndarray:
        logits = projection.logits(8).detach().numpy() / temperature
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        if merged:
            p[:, 1] += p[:, 3] + p[:, 5]
            p[:, [3, 5]] = 0
        return p

    expected = plain_value(kind, params, probabilities(student), probabilities(teacher))
    np.testing.assert_allclose(found.value.numpy(), expected, atol=1e-10)
    np.testing.assert_allclose(
        found.reverse_kl.numpy(),
        plain_value("reverse_kl", {}, probabilities(student), probabilities(teacher)),
        atol=1e-10,
    )
    assert (found.value >= -1e-12).all()


@pytest.mark.parametrize(("kind", "params"), KINDS)
@pytest.mark.parametrize(("merge", "softcap"), [((), None), (((0, 4), (2, 7)), 1.5)])
def test_gradient_against_finite_differences(kind: Any, params: dict, merge: tuple, softcap: float | None) -> None:
    student, teacher = heads(3, softcap=softcap)
    weight = torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0], dtype=torch.float64)

    def loss(hidden: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
        return divergence(
            kind,
            Projection(hidden, matrix, bias, 1.3, softcap),
            teacher,
            weight=weight,
            merge=merge,
            temperature=1.4,
            backend="chunked",
            **params,
        ).loss

    assert torch.autograd.gradcheck(loss, leaves(student))


@pytest.mark.parametrize(("kind", "params"), KINDS)
@given(seed=st.integers(0, 10**6), n=st.sampled_from([0, 1, 7]), chunk=st.sampled_from([1, 3, 100]))
def test_chunked_equals_reference(kind: Any, params: dict, seed: int, n: int, chunk: int) -> None:
    results = []
    for backend in ("reference", "chunked"):
        student, teacher = heads(seed, n=n)
        weight = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("opd.divergences.compute.CHUNK_BYTES", chunk * 4 * 9)
            found = divergence(kind, student, teacher, weight=weight, merge=((1, 2),), backend=backend, **params)  # type: ignore[arg-type]
        results.append(
            [
                found.loss,
                found.value,
                found.entropy,
                found.teacher_entropy,
                *torch.autograd.grad(3 * found.loss, leaves(student)),
            ]
        )
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("kind", "params"), KINDS)
@pytest.mark.parametrize("backend", ["reference", "chunked"])
@given(seed=st.integers(0, 10**6), merged=st.booleans())
def test_student_equal_to_teacher_is_zero_with_zero_gradient(
    kind: Any, params: dict, backend: Any, seed: int, merged: bool
) -> None:
    student, _ = heads(seed)
    teacher = Projection(
        student.hidden.detach(),
        student.weight.detach(),
        None if student.bias is None else student.bias.detach(),
        student.scale,
    )
    found = divergence(kind, student, teacher, merge=((0, 2),) if merged else (), backend=backend, **params)
    assert found.value.abs().max() < 1e-12
    for gradient in torch.autograd.grad(found.loss, leaves(student)):
        assert gradient.abs().max() < 1e-12


def test_equality_in_fp32_is_zero_too() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(32, 16, generator=generator, requires_grad=True)
    weight = torch.randn(1000, 16, generator=generator)
    found = divergence("reverse_kl", Projection(hidden, weight), Projection(hidden.detach(), weight))
    assert found.value.abs().max() < 1e-5
    assert torch.autograd.grad(found.loss, hidden)[0].abs().max() < 1e-4


def test_padded_and_unequal_vocabularies() -> None:
    student, _ = heads(0, vocabulary=12)
    teacher = Projection(torch.randn(5, 6, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64), size=7)
    short = Projection(
        student.hidden, student.weight[:7], None if student.bias is None else student.bias[:7], student.scale
    )
    torch.testing.assert_close(
        divergence("forward_kl", student, teacher).value,
        divergence("forward_kl", short, Projection(teacher.hidden, teacher.weight[:7])).value,
    )
    gradient = torch.autograd.grad(divergence("forward_kl", student, teacher).loss, student.weight)[0]
    assert gradient[7:].abs().max() == 0


def test_bf16_inputs_keep_fp32_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((64, 128), (500, 128)))
    logits = Projection(hidden, weight).logits()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden.double() @ weight.double().T, rtol=1e-5, atol=1e-4, check_dtype=False)


@given(seed=st.integers(0, 10**6), temperature=st.sampled_from([0.7, 1.0]), chunk=st.sampled_from([2, 100]))
def test_token_logprobs(seed: int, temperature: float, chunk: int) -> None:
    student, _ = heads(seed)
    ids = torch.tensor([0, 1, 2, 3, 8])
    merge = ((1, 3),)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opd.divergences.compute.CHUNK_BYTES", chunk * 4 * 9)
        found = token_logprobs(student, ids, merge=merge, temperature=temperature)
    logits = student.logits() / temperature
    normal = logits.log_softmax(-1)
    both = normal[:, [1, 3]].logsumexp(-1)
    expected = torch.stack([normal[0, 0], both[1], normal[2, 2], both[3], normal[4, 8]])
    torch.testing.assert_close(found, expected)
    weights = torch.arange(5, dtype=torch.float64)
    for left, right in zip(
        torch.autograd.grad((found * weights).sum(), leaves(student)),
        torch.autograd.grad((expected * weights).sum(), leaves(student)),
        strict=True,
    ):
        torch.testing.assert_close(left, right)


def test_ids_outside_the_vocabulary_are_rejected() -> None:
    student, _ = heads(0)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        token_logprobs(student, torch.tensor([0, 1, 2, 3, 9]))
    with pytest.raises(ValueError, match="id -3 is outside the vocabulary"):
        token_logprobs(student, torch.tensor([0, 1, 2, -3, 8]))
    pack = Pack.of(rollouts(9, [(2, 5)]))
    nothing: Any = None
    micro = MicroBatch(pack, student, nothing, {}, (), 1.0, 0.0, TokenStatistics.empty(5))
    assert micro.tokens(np.arange(5)).tolist() == pack.rollouts[0].response_ids.tolist()
    pack.rollouts[0].response_ids[3] = 9
    with pytest.raises(ValueError, match="tokens: id 9 is outside the vocabulary of 9 ids"):
        micro.tokens(np.arange(5))


@given(seed=st.integers(0, 10**6), merged=st.booleans())
def test_policy_gradient_has_the_reverse_kl_gradient_in_expectation(seed: int, merged: bool) -> None:
    """Exact enumeration: sum over tokens of behaviour(y) * gradient(loss at y) is the gradient of KL(S || T)."""
    student, teacher = heads(seed, n=1, vocabulary=6)
    size, merge = 6, ((0, 5),) if merged else ()
    log_s, log_t = log_probs(student, size, merge), log_probs(teacher, size, merge)
    behaviour = log_s.detach()[0]
    losses = importance_sampling(log_s[0], behaviour, teacher_log_ratio(log_t[0], behaviour))
    expected = (behaviour.exp() * losses).sum()
    direct = divergence("reverse_kl", student, teacher, merge=merge).loss
    # ids beyond the student's vocabulary exist on neither side
    for left, right in zip(
        torch.autograd.grad(expected, leaves(student)), torch.autograd.grad(direct, leaves(student)), strict=True
    ):
        torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-10)


def test_importance_sampling_off_policy_is_unbiased() -> None:
    """Tokens drawn from another behaviour policy: the expected gradient is that of E_S[A] at fixed A."""
    student, teacher = heads(11, n=1, vocabulary=6)
    log_s = log_probs(student, 6)[0]
    behaviour = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).log_softmax(-1)
    advantage = teacher_log_ratio(log_probs(teacher, 6)[0], behaviour)
    expected = (behaviour.exp() * importance_sampling(log_s, behaviour, advantage)).sum()
    direct = -(log_s.exp() * advantage).sum()
    for left, right in zip(
        torch.autograd.grad(expected, leaves(student), retain_graph=True),
        torch.autograd.grad(direct, leaves(student)),
        strict=True,
    ):
        torch.testing.assert_close(left, right)


def test_advantage_is_zero_at_equality_and_detached() -> None:
    logprob = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantage = teacher_log_ratio(logprob, logprob)
    assert not advantage.requires_grad
    assert advantage.abs().max() == 0
    assert importance_sampling(logprob, logprob, advantage).abs().max() == 0


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=8), seed=st.integers(0, 1000),
    aggregate=st.sampled_from(["token_mean", "sequence_mean", "prompt_mean"]),
)  # fmt: skip
def test_weights_sum_to_one(lengths: list[int], seed: int, aggregate: Any) -> None:
    generator = np.random.default_rng(seed)
    masks = [generator.random(length) < 0.7 for length in lengths]
    groups = [str(generator.integers(3)) for _ in lengths]
    weights = token_weights(masks, groups, aggregate)
    total = sum(float(weight.sum()) for weight in weights)
    assert total == pytest.approx(1.0 if any(mask.any() for mask in masks) else 0.0, abs=1e-5)
    for weight, mask in zip(weights, masks, strict=True):
        assert (weight[~mask] == 0).all()
    if aggregate == "sequence_mean":
        sums = [float(weight.sum()) for weight, mask in zip(weights, masks, strict=True) if mask.any()]
        assert sums == pytest.approx([1 / max(len(sums), 1)] * len(sums), abs=1e-5)


def test_constant_aggregation_is_a_sum() -> None:
    weights = token_weights([np.ones(2, bool), np.ones(3, bool)], ["a", "b"], "constant", denominator=4.0)
    assert [weight.tolist() for weight in weights] == [[0.25] * 2, [0.25] * 3]


def test_unknown_names_are_rejected() -> None:
    student, teacher = heads(0)
    with pytest.raises(ValueError, match="unknown divergence"):
        divergence("kl", student, teacher)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown backend"):
        divergence("reverse_kl", student, teacher, backend="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokens"):
        divergence("reverse_kl", student, teacher.rows(slice(0, 2)))


def test_objectives_stand_alone() -> None:
    code = "import sys; from opd.divergences import divergence, Projection; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_autocast_leaves_the_mathematics_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, other = (torch.randn(*shape, generator=generator) for shape in ((8, 16), (50, 16), (8, 16)))
    plain = divergence("reverse_kl", Projection(hidden, weight), Projection(other, weight))
    with torch.autocast("cpu", torch.bfloat16):
        cast = divergence("reverse_kl", Projection(hidden, weight), Projection(other, weight))
        logprobs = token_logprobs(Projection(hidden, weight), torch.arange(8))
    for left, right in ((plain.value, cast.value), (plain.entropy, cast.entropy)):
        torch.testing.assert_close(left, right)
    torch.testing.assert_close(logprobs, token_logprobs(Projection(hidden, weight), torch.arange(8)))
