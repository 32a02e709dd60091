"""Supports, closures, options and mixtures in fp64: the torch backend against the reference, the reference against numpy."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.common.errors import UserError
from opd.divergences import (
    Mixture,
    Projection,
    RowStatistics,
    TopK,
    divergence,
    likeliest_ids,
    statistics,
    token_logprobs,
)
from opd.divergences.compute import aligned, triton_plan
from opd.divergences.kinds import Formula
from opd.divergences.projection import log_probs, source_log_probs
from opd.divergences.torch_backend import TopRows, largest, largest_by_blocks
from tests.support.divergence_cases import (
    CASES,
    SMOOTH,
    assert_same,
    coarse_gradients,
    heads,
    leaves,
    outcome,
    tailed,
    textbook,
    twin,
)

SEEDS = st.integers(0, 10**6)
SUPPORTS: list[dict[str, Any]] = [
    {},
    {"support": "topk", "k": 3},
    {"support": "topk", "k": 3, "side": "student"},
    {"support": "topk", "k": 3, "side": "union"},
    {"support": "ids", "ids": torch.tensor([[1, 4, 4], [0, -1, 10], [3, 3, 3], [9, 8, 7], [2, 1, 5]])},
]
CLOSURES = ["tail", "renormalised", "teacher_renormalised", "generalised", "none"]
MERGES: list[tuple] = [(), ((1, 4),), ((0, 2, 7), (3, 10)), ((40, 2, 7), (41,), (3, 10))]  # 40 and 41 do not exist


def gate(rows: RowStatistics) -> torch.Tensor:
    """A weight that depends on what the pass itself found."""
    assert rows.value is not None
    return (rows.entropy > 1.0) * rows.value + 0.1 * rows.index


@settings(max_examples=100)
@given(
    seed=SEEDS, case=st.sampled_from(CASES), support=st.sampled_from(SUPPORTS), closure=st.sampled_from(CLOSURES),
    merge=st.sampled_from(MERGES), temperature=st.sampled_from([1.0, 0.6, 2.0]), softcap=st.sampled_from([None, 2.5]),
    bias=st.booleans(), padded=st.sampled_from([0, 3]), weight=st.sampled_from(["none", "mask", "gate"]),
    teacher=st.sampled_from(["plain", "arithmetic", "geometric"]), chunk=st.sampled_from([1, 3, 100]),
)  # fmt: skip
def test_chunked_equals_reference(
    seed: int, case: Any, support: dict, closure: Any, merge: tuple, temperature: float, softcap: Any, bias: bool,
    padded: int, weight: str, teacher: str, chunk: int,
) -> None:  # fmt: skip
    kind, params = case
    if support and closure == "generalised" and kind == "acceptance":
        return
    results = []
    for backend in ("reference", "chunked"):
        student, source = heads(seed, bias=bias, softcap=softcap, padded=padded)
        _, second = heads(seed + 1, bias=not bias, softcap=softcap, padded=padded)
        if teacher != "plain":
            weights = [0.3, 0.7, 0.5] if teacher == "arithmetic" else [1.5, -0.5, 0.4]
            source = Mixture([source, second, student], weights, teacher)  # type: ignore[arg-type, assignment]
        weights_by_name: dict[str, Any] = {"none": None, "mask": torch.tensor([1.0, 0, 2, 0, 0.5]), "gate": gate}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("opd.divergences.compute.CHUNK_BYTES", chunk * 4 * 11)
            found = divergence(
                kind, student, source, **support, closure=closure, merge=merge, temperature=temperature,
                weight=weights_by_name[weight], tokens=torch.tensor([0, 1, 4, 10, 3]), overlap=4, backend=backend, **params,
            )  # type: ignore[arg-type]  # fmt: skip
        assert found.plan.backend == backend
        results.append(outcome(found, student))
    assert_same(*results)


@pytest.mark.parametrize("closure", CLOSURES)
@pytest.mark.parametrize(("kind", "params"), CASES)
@settings(max_examples=10)
@given(seed=SEEDS, support=st.sampled_from(SUPPORTS[1:]))
def test_truncated_value_is_the_textbook_sum(kind: Any, params: dict, closure: Any, seed: int, support: dict) -> None:
    if (kind == "acceptance" and closure == "generalised") or (
        kind != "forward_kl" and closure == "teacher_renormalised"
    ):
        return
    student, teacher = heads(seed)
    found = divergence(kind, student, teacher, **support, closure=closure, **params).value.numpy()
    s, t = (log_probs(side, 11).exp().detach().numpy() for side in (student, teacher))
    for row in range(5):
        tops = {"teacher": [t], "student": [s], "union": [s, t]}[support.get("side", "teacher")]
        chosen = {int(i) for i in support["ids"][row] if i >= 0} if "ids" in support else set()
        for side in tops if not chosen else []:
            chosen |= set(np.argsort(-side[row])[: support["k"]].tolist())
        index = sorted(chosen)
        p, q = s[row, index], t[row, index]
        if closure == "tail":
            p, q = np.append(p, 1 - p.sum()), np.append(q, 1 - q.sum())
        elif closure == "renormalised":
            p, q = p / p.sum(), q / q.sum()
        if closure in ("tail", "renormalised"):
            expected = textbook(kind, params, p, q)
        elif closure == "teacher_renormalised":
            expected = textbook(kind, params, p, q / q.sum())
        else:
            expected = pointwise(kind, params, p, q, generalised=closure == "generalised")
        assert found[row] == pytest.approx(float(expected), rel=1e-7, abs=1e-9)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("merge", [(), ((1, 4),)])
def test_the_sampled_token_joins_the_support(backend: Any, merge: tuple) -> None:
    student, teacher = heads(3)
    tokens = torch.tensor([0, 4, 10, 7, 1])
    options: dict[str, Any] = {"merge": merge, "closure": "renormalised", "backend": backend}
    found = divergence("reverse_kl", student, teacher, support="topk", k=3, with_sampled=True, tokens=tokens, **options)
    top = log_probs(teacher, 11, merge).topk(3).indices
    events = torch.where(tokens == 4, 1, tokens) if merge else tokens
    wanted = divergence(
        "reverse_kl", student, teacher, support="ids", ids=torch.cat([top, events[:, None]], -1), **options
    )
    torch.testing.assert_close(found.value, wanted.value)
    for mine, theirs in zip(*(torch.autograd.grad(one.loss, leaves(student)) for one in (found, wanted)), strict=True):
        torch.testing.assert_close(mine, theirs)
    with pytest.raises(ValueError, match="with_sampled adds `tokens`"):
        divergence("reverse_kl", student, teacher, support="topk", k=3, with_sampled=True)


def test_the_closure_of_eopd_is_least_where_the_student_is_the_teacher_without_its_tail() -> None:
    _, teacher = heads(4)
    log_t = log_probs(teacher, 11).detach()
    top = log_t.topk(3)
    kept = torch.full_like(log_t, -1e30).scatter(-1, top.indices, top.values).log_softmax(-1)
    options: dict[str, Any] = {"support": "topk", "k": 3, "closure": "teacher_renormalised"}
    assert float(divergence("forward_kl", kept, log_t, **options).value.abs().max()) < 1e-9
    assert float(divergence("forward_kl", log_t, log_t, **options).value.min()) > 0.01


def pointwise(kind: str, params: dict[str, float], s: np.ndarray, t: np.ndarray, generalised: bool) -> Any:
    """sum S f(u) with f'(1) by a finite difference."""
    a = params.get("alpha", params.get("beta", 0.0))

    def f(u: np.ndarray) -> np.ndarray:
        table: dict[str, Any] = {
            "reverse_kl": lambda: -np.log(u),
            "forward_kl": lambda: u * np.log(u),
            "jsd": lambda: a * u * np.log(u / (a * u + 1 - a)) - (1 - a) * np.log(a * u + 1 - a),
            "skew_kl": lambda: u * np.log(u / (a * u + 1 - a)),
            "skew_reverse_kl": lambda: -np.log((1 - a) * u + a),
            "alpha": lambda: (u**a - 1) / (a * (a - 1)),
            "tvd": lambda: np.abs(u - 1) / 2,
            "hellinger": lambda: (np.sqrt(u) - 1) ** 2,
        }
        return table["reverse_kl" if (kind, a) == ("jsd", 1.0) else kind]()

    if kind == "acceptance":
        return -np.log(np.minimum(s, t).sum())
    one = np.array([1 + 1e-5, 1 - 1e-5])
    slope = (f(one)[0] - f(one)[1]) / 2e-5 if generalised else 0.0
    return (s * f(t / s) - slope * (t - s)).sum()


@pytest.mark.parametrize("closure", ["tail", "renormalised", "generalised"])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize(("kind", "params"), [case for case in CASES if case[0] in SMOOTH])
@settings(max_examples=8)
@given(seed=SEEDS, support=st.sampled_from(SUPPORTS), merge=st.sampled_from(MERGES))
def test_every_closure_is_zero_with_zero_gradient_at_equality(
    kind: Any, params: dict, closure: Any, backend: Any, seed: int, support: dict, merge: tuple
) -> None:
    student, _ = heads(seed)
    found = divergence(kind, student, twin(student), **support, closure=closure, merge=merge, backend=backend, **params)
    assert found.value.abs().max() < 1e-11
    for gradient in torch.autograd.grad(found.loss, leaves(student)):
        assert gradient.abs().max() < 1e-11


def test_the_bare_sum_is_not_a_divergence() -> None:
    student, _ = heads(0)
    found = divergence("reverse_kl", student, twin(student), support="topk", k=3, closure="none")
    assert torch.autograd.grad(found.loss, student.hidden)[0].abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["tvd", "acceptance"])
def test_kinks_have_their_one_sided_gradient_near_equality(kind: Any) -> None:
    """Off the kink the analytic gradient is the finite difference, however close the two sides are."""
    student, _ = heads(4)
    generator = torch.Generator().manual_seed(1)
    nudge = 1e-2 * torch.randn(5, 4, generator=generator, dtype=torch.float64)
    teacher = replace(twin(student), hidden=twin(student).hidden + nudge)
    weight, bias = student.weight.detach(), student.bias
    assert torch.autograd.gradcheck(
        lambda hidden: (
            divergence(kind, Projection(hidden, weight, bias, 1.3, None, 11), teacher, backend="chunked").loss
        ),
        student.hidden,
    )


def served(teacher: Projection, k: int, merge: tuple = (), stop: bool = False) -> TopK:
    """What a remote teacher would send: unmerged top-k, tail, and the stop event's mass if asked."""
    plain = log_probs(teacher, 11)
    top = plain.topk(k)
    group = list(merge[0]) if stop else []
    mass = plain[:, group].logsumexp(-1) if stop else torch.full((teacher.count,), float("nan"))
    tail = (1 - top.values.exp().sum(-1)).log()
    return TopK(top.indices.numpy(), top.values.numpy(), tail.numpy(), mass.numpy(), "fingerprint")


@pytest.mark.parametrize("closure", CLOSURES)
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_served_top_k_equals_the_local_one(closure: Any, backend: Any) -> None:
    student, teacher = heads(6)
    options: dict[str, Any] = {"support": "topk", "closure": closure, "backend": backend}
    remote = divergence("jsd", student, served(teacher, 4), **options)
    local = divergence("jsd", student, teacher, k=4, **options)
    torch.testing.assert_close(remote.value, local.value)
    for left, right in zip(
        *(torch.autograd.grad(found.loss, leaves(student)) for found in (remote, local)), strict=True
    ):
        torch.testing.assert_close(left, right)


def test_a_served_top_k_with_the_stop_mass_is_one_event() -> None:
    student, teacher = heads(6)
    merge = ((1, 4, 9),)
    found = divergence("reverse_kl", student, served(teacher, 11, merge, stop=True), support="topk", merge=merge)
    torch.testing.assert_close(found.value, divergence("reverse_kl", student, teacher, merge=merge).value)
    complete = divergence("reverse_kl", student, served(teacher, 11), support="topk", merge=merge)
    torch.testing.assert_close(found.value, complete.value)


def test_an_incomplete_group_goes_to_the_tail_on_both_sides() -> None:
    student, teacher = heads(6, n=1)
    best = log_probs(teacher, 11).topk(4).indices[0].tolist()
    missing = next(index for index in range(11) if index not in best)
    found = divergence("forward_kl", student, served(teacher, 4), support="topk", merge=((best[0], missing),))
    ids = torch.tensor([best[1:]])
    expected = divergence("forward_kl", student, teacher, support="ids", ids=ids)
    torch.testing.assert_close(found.value, expected.value)


TAILS = st.floats(-40, -2)
SIDES = ["teacher", "student", "union"]


def tops(student: Projection, teacher: Projection, side: str, k: int, merge: tuple, tau: float) -> list[list[int]]:
    """The likeliest ids of each row, found by numpy."""
    both = [log_probs(one, 61, merge, tau).detach().numpy() for one in (teacher, student)]
    sides = {"teacher": both[:1], "student": both[1:], "union": both}[side]
    return [sorted({int(i) for one in sides for i in np.argsort(-one[row])[:k]}) for row in range(len(both[0]))]


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize(("kind", "params"), CASES)
@settings(max_examples=6)
@given(
    seed=SEEDS, tails=st.lists(st.tuples(TAILS, TAILS), min_size=3, max_size=3), side=st.sampled_from(SIDES),
    merge=st.sampled_from([(), ((0, 2, 7), (3, 10))]), tau=st.sampled_from([1.0, 1.3]),
)  # fmt: skip
def test_a_small_tail_is_exact_in_single_precision(
    kind: Any,
    params: dict,
    backend: Any,
    seed: int,
    tails: list[tuple[float, float]],
    side: Any,
    merge: tuple,
    tau: float,
) -> None:
    """From 0.1 down to 4e-18, where one minus the sum over the support says nothing: value and gradients, row by row."""
    s, t = [one for one, _ in tails], [other - 0.2 * (abs(one - other) < 0.2) for one, other in tails]  # off the kinks
    exact, single = (tailed(s, t, dtype, seed=seed) for dtype in (torch.float64, torch.float32))
    ids = tops(*exact, side, 8, merge, tau)
    values, gradients = coarse_gradients(Formula.of(kind, params), *exact, ids, merge, tau)
    options: dict[str, Any] = {"side": side, "merge": merge, "temperature": tau, "backend": backend}
    found = divergence(kind, *single, support="topk", k=8, **options, **params)
    assert found.value.tolist() == pytest.approx(values, rel=1e-4, abs=1e-5)
    for one, other in zip(torch.autograd.grad(found.loss, leaves(single[0])), gradients, strict=True):
        assert (one.double() - other).norm() < 1e-4 * other.norm() + 1e-5


def test_the_tail_pulls_at_ids_outside_as_hard_as_it_should() -> None:
    """A teacher with a tail of -26 and a student with most of its mass there: the loss was 21.7 for 26.9, with the gradient of
    the ids outside several times too large."""
    exact, single = (tailed([-0.01], [-26.0], dtype) for dtype in (torch.float64, torch.float32))
    ids = tops(*exact, "teacher", 8, (), 1.0)
    (value,), (_, wanted) = coarse_gradients(Formula("reverse_kl"), *exact, ids)
    assert value > 25
    for backend in ("reference", "chunked"):
        found = divergence("reverse_kl", *single, support="topk", k=8, backend=backend)  # type: ignore[arg-type]
        assert found.loss.item() == pytest.approx(value, rel=1e-5)
        (gradient,) = torch.autograd.grad(found.loss, single[0].weight)
        torch.testing.assert_close(gradient.double(), wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize(("kind", "params"), CASES)
def test_no_tail_where_the_support_is_everything(kind: Any, params: dict, backend: Any) -> None:
    """log 0 on both sides: the full divergence. A tail that is below the smallest float is still one."""
    student, teacher = tailed([-3.0, -9.0], [-4.0, -2.0], torch.float32)
    everything = torch.arange(61).expand(2, 61)
    for merge in ((), ((0, 2, 7), (3, 10))):
        full = divergence(kind, student, teacher, backend=backend, merge=merge, **params)
        wanted = torch.autograd.grad(full.loss, leaves(student))
        for options in ({"support": "ids", "ids": everything}, {"support": "topk", "k": 61}):
            found = divergence(kind, student, teacher, backend=backend, merge=merge, **options, **params)
            torch.testing.assert_close(found.value, full.value, rtol=1e-5, atol=1e-6)
            for one, other in zip(torch.autograd.grad(found.loss, leaves(student)), wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    if params.get("alpha") != 2.0:  # T^2 / S is infinite there
        exact, single = (tailed([-200.0, -2.0], [-2.0, -200.0], dtype) for dtype in (torch.float64, torch.float32))
        values, wanted = coarse_gradients(Formula.of(kind, params), *exact, tops(*exact, "teacher", 8, (), 1.0))
        found = divergence(kind, *single, backend=backend, support="topk", k=8, **params)
        assert found.value.tolist() == pytest.approx(values, rel=1e-4, abs=1e-5)
        for one, other in zip(torch.autograd.grad(found.loss, leaves(single[0])), wanted, strict=True):
            assert (one.double() - other).norm() < 1e-4 * other.norm()


def test_a_row_without_ids_is_all_tail() -> None:
    student, teacher = tailed([-3.0, -9.0], [-4.0, -2.0], torch.float32)
    ids = torch.tensor([[-1, -1], [0, -1]])
    for backend in ("reference", "chunked"):
        found = divergence("jsd", student, teacher, support="ids", ids=ids, backend=backend)  # type: ignore[arg-type]
        gradients = torch.autograd.grad(found.loss, leaves(student))
        assert found.value[0].abs() < 1e-6
        assert found.value[1] > 0
        assert gradients[1][:, 0].abs().max() < 1e-6
        assert gradients[1][:, 1].abs().max() > 1e-6


@pytest.mark.parametrize("k", [None, 5])
@pytest.mark.parametrize("merge", [(), ((0, 2, 7), (3, 10))])
def test_a_tail_that_was_sent_stays_sharp(merge: tuple, k: int | None) -> None:
    """A teacher that has whole rows sends the log-sum-exp. Merging and cutting add to it; they do not make it anew."""
    student, teacher = tailed([-12.0, -3.0, -30.0], [-20.0, -40.0, -31.0], torch.float32)
    ids, logprobs, tail, stop = likeliest_ids(teacher, 8, merge[0] if merge else ())
    sent = TopK(*(part.numpy() for part in (ids, logprobs, tail, stop)), "")
    if not merge:
        assert tail.tolist() == pytest.approx([-20, -40, -31], abs=1e-4)
    found = divergence("reverse_kl", student, sent, support="topk", k=k, merge=merge)
    assert found.statistics.vague_tail is not None
    assert not found.statistics.vague_tail.any()
    top = log_probs(teacher, 61, merge).topk(k or 8)
    chosen = torch.cat([top.indices, *(torch.full((3, 1), group[0]) for group in merge[: 1 if k is None else 0])], -1)
    exact = divergence("reverse_kl", student, teacher, support="ids", ids=chosen, merge=merge)
    torch.testing.assert_close(found.value, exact.value, rtol=1e-4, atol=1e-5)
    for one, other in zip(*(torch.autograd.grad(some.loss, leaves(student)) for some in (found, exact)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("size", [61, 4000])
def test_what_rounding_makes_of_a_sum_is_no_tail(size: int) -> None:
    """Logits of 60 are rounded to 4e-6 in their normaliser, and with it each log-prob: what the sum then lacks says nothing. A tail
    that was sent counts even where the rounded sum is above 1."""
    generator = torch.Generator().manual_seed(0)
    tails = torch.arange(-30, -5, 0.1, dtype=torch.float64)
    inside = torch.randn(len(tails), 20, generator=generator, dtype=torch.float64).log_softmax(-1)
    rest = torch.randn(len(tails), size - 20, generator=generator, dtype=torch.float64).log_softmax(-1) + tails[:, None]
    logits = (torch.cat([inside, rest], -1) + 60).float()
    logprobs = logits - logits.logsumexp(-1, keepdim=True)  # as a server's kernel has it
    ids, nan = np.tile(np.arange(20, dtype=np.int32), (len(tails), 1)), np.full(len(tails), np.nan, np.float32)
    exact = logits.double().log_softmax(-1)[:, 20:].logsumexp(-1)
    sums = logprobs[:, :20].double().exp().sum(-1)
    assert (sums[tails < -14] > 1 + 1e-7).any()
    assert (1 - sums[tails < -14] > 2e-7).any()
    for sent in (nan, exact.float().numpy()):
        top = TopK(ids, logprobs[:, :20].numpy(), sent, nan, "")
        found = TopRows.of(top, torch.device("cpu"), torch.float32, (), size, None, 1.0)
        known = ~found.vague
        torch.testing.assert_close(found.tail[known].double(), exact[known], rtol=0, atol=0.7 if sent is nan else 1e-5)
        assert known.tolist() == [sent is not nan or 1 - float(sum_) > 3.8e-6 for sum_ in sums]


@pytest.mark.parametrize("sent", [float("nan"), float(np.log(np.finfo(np.float32).eps))])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_what_a_sum_near_one_cannot_tell(backend: Any, sent: float) -> None:
    """Of a tail below 1e-7 a server without whole rows knows that it is below: the statistics say so, the value is a lower bound,
    and a student whose tail is as small as that is not pulled."""
    student, teacher = tailed([-1.0, -30.0, -2.0], [-26.0, -26.0, -3.0], torch.float32)
    top = log_probs(teacher, 61).topk(8)
    tail = np.array([sent, sent, np.log(-np.expm1(top.values[2].double().logsumexp(-1).item()))], np.float32)
    nan = np.full(3, np.nan, np.float32)
    found = divergence("alpha", student, TopK(top.indices.numpy(), top.values.numpy(), tail, nan, ""), support="topk",
                       backend=backend, alpha=3.0)  # fmt: skip
    assert found.statistics.vague_tail is not None
    assert found.statistics.vague_tail.tolist() == [True, True, False]
    assert found.value.isfinite().all()
    exact = divergence("reverse_kl", student, teacher, support="topk", k=8)
    assert found.reverse_kl[0] < exact.value[0] - 1
    torch.testing.assert_close(found.reverse_kl[1:], exact.value[1:], rtol=1e-4, atol=1e-5)
    (gradient,) = torch.autograd.grad(found.loss, student.weight)
    outside = torch.ones(61, dtype=torch.bool).scatter(0, top.indices[1], torch.zeros(8, dtype=torch.bool))
    assert gradient[outside, 1].abs().max() < 1e-6
    assert gradient[outside, 0].abs().max() > 1e-4


def test_masses_above_one_are_clamped() -> None:
    student, _ = heads(0, n=1)
    top = TopK(np.array([[0, 1]]), np.log(np.array([[0.7, 0.4]])), np.array([-9.0]), np.array([np.nan]), "")
    found = divergence("jsd", student, top, support="topk")
    assert found.value.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(found.loss, leaves(student)))


def test_what_a_served_top_k_cannot_do_is_rejected() -> None:
    student, teacher = heads(0)
    top = served(teacher, 3)
    with pytest.raises(ValueError, match="renormalised"):
        divergence("jsd", student, top, support="topk", temperature=2.0)
    assert (
        divergence("jsd", student, top, support="topk", temperature=2.0, closure="renormalised").value.isfinite().all()
    )
    with pytest.raises(ValueError, match="TopK teacher"):
        divergence("jsd", student, top)
    with pytest.raises(ValueError, match="TopK teacher"):
        divergence("jsd", student, top, support="topk", side="union", k=2)


def test_bad_requests_are_rejected() -> None:
    student, teacher = heads(0)
    for options, words in [
        ({"support": "top"}, "unknown support"),
        ({"closure": "open"}, "unknown closure"),
        ({"support": "ids"}, "go together"),
        ({"support": "topk", "side": "student"}, "needs k"),
        ({"support": "topk", "k": 0}, "at least 1"),
        ({"weight": torch.ones(3)}, "expected"),
        ({"tokens": torch.full((5,), 11)}, "tokens: id 11 is outside the vocabulary"),
        ({"tokens": torch.full((5,), -1)}, "tokens: id -1 is outside the vocabulary"),
        ({"tokens": torch.full((5,), 11), "trusted": True}, "outside the vocabulary"),
        ({"support": "ids", "ids": torch.tensor([[3, -2]]).expand(5, 2)}, "ids: id -2 is outside the vocabulary"),
    ]:
        with pytest.raises(ValueError, match=words):
            divergence("reverse_kl", student, teacher, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="f-divergence"):
        divergence("acceptance", student, teacher, support="topk", k=2, closure="generalised")
    with pytest.raises(ValueError, match="weights"):
        Mixture([teacher, teacher], [1.0, -0.5])


@pytest.mark.gpu
def test_unknown_ids_leave_the_device_usable() -> None:
    student, teacher = (
        Projection(torch.randn(5, 16, device="cuda"), torch.randn(11, 16, device="cuda")) for _ in range(2)
    )
    for unknown in (11, -1):
        tokens = torch.tensor([0, 1, 2, unknown, 3], device="cuda")
        for ask in (
            lambda tokens=tokens: token_logprobs(student, tokens),
            lambda tokens=tokens: statistics(student, teacher, tokens=tokens),
            lambda tokens=tokens: divergence("reverse_kl", student, teacher, tokens=tokens),
        ):
            with pytest.raises(ValueError, match=f"id {unknown} is outside the vocabulary of 11 ids"):
                ask()
    known = torch.arange(5, device="cuda")
    assert torch.equal(token_logprobs(student, known), token_logprobs(student, known, trusted=True))


@given(seed=SEEDS, temperature=st.sampled_from([1.0, 0.7]), merge=st.sampled_from(MERGES))
def test_mixtures_are_what_they_say(seed: int, temperature: float, merge: tuple) -> None:
    _, one = heads(seed)
    _, two = heads(seed + 1)
    parts = [log_probs(part, 11, merge, temperature).exp() for part in (one, two)]
    arithmetic = source_log_probs(Mixture([one, two], [1.0, 3.0]), 11, merge, temperature).exp()
    torch.testing.assert_close(arithmetic, 0.25 * parts[0] + 0.75 * parts[1])
    geometric = source_log_probs(Mixture([one, two], [2.0, -0.5], "geometric"), 11, merge, temperature).exp()
    keep = parts[0] > 0
    raw = torch.where(keep, parts[0] ** 2 * torch.where(keep, parts[1], 1.0) ** -0.5, 0.0)
    torch.testing.assert_close(geometric, raw / raw.sum(-1, keepdim=True))


def test_veto_has_the_teacher_as_a_factor() -> None:
    """Veto, T * sg(S)^beta: the forward-KL gradient in the logits is S - Q, with the student's part detached."""
    student, teacher = heads(3, bias=False)
    found = divergence("forward_kl", student, Mixture([teacher, student], [1.0, 0.8], "geometric"))
    s, t = log_probs(student, 11), log_probs(teacher, 11)
    q = (t + 0.8 * s.detach()).softmax(-1)
    expected = torch.autograd.grad((q * (q.log() - s)).sum(), student.hidden)[0]
    torch.testing.assert_close(torch.autograd.grad(found.loss, student.hidden)[0], expected)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("n", [0, 1])
def test_no_rows_and_one_row(n: int, backend: Any) -> None:
    student, teacher = heads(0, n=n)
    found = divergence("jsd", student, teacher, backend=backend)
    found.loss.backward()
    assert student.hidden.grad is not None
    assert student.hidden.grad.shape == (n, 4)
    assert found.value.shape == (n,)
    assert token_logprobs(student, torch.zeros(n, dtype=torch.long)).shape == (n,)
    assert statistics(student, teacher).entropy.shape == (n,)


def test_tied_heads_get_both_gradients() -> None:
    """One matrix as embedding and head: its gradient is the sum of both uses."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(9, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    _, teacher = heads(0, vocabulary=9)

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return divergence("reverse_kl", Projection(weight[[0, 3, 3, 5, 8]], weight), teacher).loss

    assert torch.autograd.gradcheck(loss, matrix)


@given(seed=SEEDS, merge=st.sampled_from(MERGES), kind=st.sampled_from(CASES))
def test_statistics_match_the_divergence(seed: int, merge: tuple, kind: Any) -> None:
    student, teacher = heads(seed)
    tokens = torch.tensor([0, 4, 1, 10, 2])
    found = divergence(kind[0], student, teacher, merge=merge, tokens=tokens, overlap=3, **kind[1]).statistics
    alone = statistics(student, teacher, kind=kind[0], merge=merge, tokens=tokens, overlap=3, **kind[1])
    for left, right in zip(vars(found).values(), vars(alone).values(), strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            torch.testing.assert_close(left, right)
    torch.testing.assert_close(found.logprob, token_logprobs(student, tokens, merge=merge).detach())
    if merge:
        first = [index for index in merge[0] if index < 11]
        torch.testing.assert_close(found.stop, log_probs(student, 11)[:, first].exp().sum(-1).detach())


def test_an_id_is_part_of_one_event() -> None:
    student, teacher = heads(0)
    twice = ((1, 4), (7, 4, 1))
    for call in (
        lambda: divergence("reverse_kl", student, teacher, merge=twice),
        lambda: statistics(student, teacher, merge=twice),
        lambda: token_logprobs(student, torch.zeros(5, dtype=torch.long), merge=twice),
    ):
        with pytest.raises(ValueError, match=r"ids \[1, 4\] are in more than one"):
            call()
    once, same = (statistics(student, teacher, merge=(group,)).stop for group in ((1, 4), (1, 4, 1)))
    torch.testing.assert_close(once, same)


def test_a_retained_graph_gives_its_gradients_again() -> None:
    """The first backward hands its gradients out and scales them in place; later ones must not see that."""
    student, teacher = heads(1)
    loss = divergence("jsd", student, teacher).loss
    first, second, third = (
        torch.autograd.grad(factor * loss, leaves(student), retain_graph=True) for factor in (1.0, -2.0, 0.0)
    )
    for one, two, three in zip(first, second, third, strict=True):
        torch.testing.assert_close(two, -2 * one)
        assert (three == 0).all()
    with torch.no_grad():
        student.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="changed between"):
        torch.autograd.grad(loss, leaves(student))


@pytest.mark.parametrize("support", SUPPORTS[:4])
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_runs_are_identical(backend: Any, support: dict) -> None:
    first, second = (
        outcome(divergence("jsd", student, teacher, backend=backend, **support), student)
        for student, teacher in (heads(5), heads(5))
    )
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))


def test_auto_says_why() -> None:
    student, teacher = heads(1)
    assert divergence("jsd", student, teacher).plan.reason == "tensors are on cpu"
    assert "a bias runs in torch" in divergence("jsd", student, teacher, support="topk", k=2).plan.reason
    plain = heads(1, bias=False)
    assert divergence("jsd", *plain, support="topk", k=2).plan.reason == "tensors are on cpu"
    assert "most of the vocabulary" in divergence("jsd", *plain, support="topk", k=8).plan.reason
    with pytest.raises(ValueError, match="backend triton: tensors are on cpu"):
        divergence("jsd", student, teacher, backend="triton")


@given(
    count=st.integers(1, 200_000), size=st.sampled_from([301, 49152, 151936, 262144]), width=st.sampled_from([64, 1024, 4096]),
    memory=st.integers(2**26, 2**34),
)  # fmt: skip
def test_plans_keep_to_their_budget(count: int, size: int, width: int, memory: int) -> None:
    student = Projection(
        torch.empty(count, width, dtype=torch.bfloat16, device="meta"),
        torch.empty(size, width, dtype=torch.bfloat16, device="meta").requires_grad_(),
    )
    try:
        plan = triton_plan(student, size, memory)
    except ValueError:
        assert memory < 2 * size * width + count * (6 * width + 64) + 8 * 256 * 256 + 4 * 256 * width
        return
    head, states = size * width, 2 * count * width
    if plan.mode == "fast":
        used = 4 * head + states + 8 * plan.chunk * aligned(size)
    else:
        used = 2 * head + states + 4 * count * width + 8 * plan.chunk * plan.slab + 4 * plan.slab * width
    assert used <= memory * 1.02 + 8 * 64 * plan.chunk
    assert 1 <= plan.chunk <= count


@pytest.mark.parametrize(("size", "k"), [(1000, 3), (1024, 1), (700, 20), (65, 5)])
def test_the_largest_are_found_by_blocks(size: int, k: int) -> None:
    """As on a GPU: in the blocks with the largest maxima, or behind the last whole block, wherever they lie together."""
    generator = torch.Generator().manual_seed(size)
    values = torch.stack([torch.randperm(size, generator=generator).float() for _ in range(7)])
    values[1] = torch.arange(size)  # all in the last block, and behind it
    values[2] = -values[1]
    values[3, 5:] = -torch.inf
    wanted, found = values.topk(k), largest_by_blocks(values, k)
    assert torch.equal(found[0], wanted.values)
    assert torch.equal(values.gather(-1, found[1]), wanted.values)
    assert torch.equal(largest(values, k)[1], wanted.indices)  # on a CPU as it was


# Logits in place of heads


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("reverse_kl", {}),
        ("forward_kl", {"weight": torch.linspace(0, 1, 6, dtype=torch.float64)}),
        ("jsd", {"beta": 0.3, "temperature": 0.7, "merge": [(1, 5)], "tokens": torch.arange(6), "overlap": 3}),
        ("reverse_kl", {"support": "topk", "k": 4, "side": "union"}),
        ("skew_kl", {"support": "topk", "k": 4, "closure": "renormalised"}),
    ],
)
def test_logits_give_what_their_heads_give(kind: str, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, other, head = (
        torch.randn(*shape, 5, generator=generator, dtype=torch.float64) for shape in ((6,), (40,), (6,), (40,))
    )
    hidden.requires_grad_()
    teacher = Projection(other, head)
    expected = divergence(kind, Projection(hidden, weight), teacher, **options)
    (wanted,) = torch.autograd.grad(expected.loss, hidden)
    for source in (teacher.logits(), teacher, Mixture([teacher.logits(), teacher], [0.5, 0.5])):
        found = divergence(kind, hidden @ weight.T, source, **options)
        (gradient,) = torch.autograd.grad(found.loss, hidden)
        torch.testing.assert_close(found.value, expected.value, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-11)
        assert (found.plan.backend, found.plan.reason) == ("reference", "logits were given")
    mixed = divergence(kind, Projection(hidden, weight), teacher.logits(), **options)
    torch.testing.assert_close(torch.autograd.grad(mixed.loss, hidden)[0], wanted, rtol=1e-9, atol=1e-11)
    ids = torch.arange(6)
    for name in ("merge", "temperature"):
        few = {name: options[name]} if name in options else {}
        of_head = token_logprobs(Projection(hidden, weight), ids, **few)
        torch.testing.assert_close(token_logprobs(hidden @ weight.T, ids, **few), of_head)


def test_logits_of_minus_infinity_add_nothing() -> None:
    student = torch.randn(3, 8, dtype=torch.float64)
    student[:, 5:] = -torch.inf
    student.requires_grad_()
    found = divergence("reverse_kl", student, student.detach().roll(1, 0).clone())
    found.loss.backward()
    assert torch.isfinite(found.value).all()
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()
    assert not divergence("jsd", student.detach()[:0], student.detach()[:0]).loss.item()


def test_what_is_neither_head_nor_logits_is_rejected() -> None:
    logits, head = torch.randn(3, 8), Projection(torch.randn(3, 4), torch.randn(8, 4))
    for student, teacher, words in [
        (logits, None, "teacher: expected a Projection.* got NoneType"),
        (1.0, 2.0, "student: expected a Projection.* got float"),
        (logits.numpy(), logits, "student: expected a Projection.* got ndarray"),
        (logits[None], logits[None], r"student: expected logits of shape \(N, V\).*\(1, 3, 8\).*logits\[mask\]"),
        (head, torch.arange(24).reshape(3, 8), r"teacher: expected logits .*torch.int64"),
    ]:
        with pytest.raises(UserError, match=words):
            divergence("reverse_kl", student, teacher)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="projection: expected"):
        token_logprobs(None, torch.arange(3))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="part 1 of a mixture: expected"):
        Mixture([head, 3], [1, 1])  # type: ignore[list-item]
    with pytest.raises(UserError, match="student: statistics takes Projections"):
        statistics(logits)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'chunked' computes logits itself"):
        divergence("reverse_kl", logits, logits, backend="chunked")
    with pytest.raises(ValueError, match="student has 3 tokens, but teacher has 2"):
        divergence("reverse_kl", logits, logits[:2])


@pytest.mark.parametrize("plain", [False, True])
def test_heads_of_different_sizes_are_compared_on_what_both_have_and_this_is_said(plain: bool) -> None:
    student, teacher = (Projection(torch.randn(3, 4), torch.randn(size, 4)) for size in (8, 11))
    expected = divergence("jsd", student, replace(teacher, size=8)).value
    with pytest.warns(UserWarning, match="student has 8 ids, the teacher 11. Ids from 8 on are left out on both sides"):
        found = divergence("jsd", student, teacher.logits() if plain else teacher)
    torch.testing.assert_close(found.value, expected)
    with pytest.warns(UserWarning, match="the teacher 8, 11"):
        divergence("jsd", student, Mixture([student, teacher], [1, 1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        divergence("jsd", student, replace(teacher, size=8))
        statistics(student, replace(teacher, size=8))
