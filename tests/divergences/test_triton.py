"""The CUDA backend against the reference: on a GPU where there is one, else through Triton's interpreter.

`make test-kernels` runs these with TRITON_INTERPRET=1; `make test` skips them.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

from opd.divergences import Mixture, Projection, divergence, statistics, token_logprobs
from opd.divergences.compute import KernelPlan
from opd.divergences.torch_backend import RowStatistics
from tests.support.divergence_cases import CASES, SMOOTH, leaves, tailed

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs CUDA or TRITON_INTERPRET=1"),
]
ROWS = 4 if INTERPRETED else 16
DEVICE = "cpu" if INTERPRETED else "cuda"
N, V, DS, DT = (7 if INTERPRETED else 37), 301, 16, 24  # the interpreter takes its time


def heads(seed: int, dtype: torch.dtype, *, bias: bool, softcap: float | None, n: int = N) -> list[Projection]:
    """A student and two teachers with padded rows of the head; the same values in any type."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for width in (DS, DT, DT):
        tensors = [torch.randn(*shape, generator=generator) for shape in ((n, width), (V + 5, width), (V + 5,))]
        tensors[1] = tensors[1] * 3 / width**0.5
        hidden, weight, shift = (tensor.to(torch.bfloat16).to(DEVICE, dtype) for tensor in tensors)
        found.append(Projection(hidden, weight, shift if bias else None, 1.2, softcap, V))
    for tensor in leaves(found[0]):
        tensor.requires_grad_()
    return found


def run(
    heads: list[Projection], kind: str, params: dict, mixture: str, backend: str, mode: str, **options: Any
) -> dict[str, Any]:
    student, *teachers = heads
    teacher: Any = teachers[0]
    if mixture:
        weights = [0.4, 0.6] if mixture == "arithmetic" else [1.4, -0.4]
        teacher = Mixture(teachers, weights, mixture)  # type: ignore[arg-type]
    found = divergence(kind, student, teacher, backend=backend, **options, **params)  # type: ignore[arg-type]
    assert backend == "reference" or found.plan.mode == mode
    gradients = torch.autograd.grad(2 * found.loss, leaves(student))
    return {
        "loss": found.loss, **{name: value for name, value in vars(found.statistics).items() if value is not None},
        **{f"gradient {index}": gradient for index, gradient in enumerate(gradients)},
    }  # fmt: skip


def compare(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        target = expected[name].double()
        error = (value.double() - target).norm() / (target.norm() + 1e-3)
        assert error <= (tolerance if "gradient" in name else 1e-4), f"{name}: {float(error)}"


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces, so that little tensors still make several chunks, slabs and blocks; any budget means `small`."""

    def plan(student: Projection, size: int, memory: int | None) -> KernelPlan:
        return KernelPlan("triton", "a test", ROWS, 128 if memory else 0)

    monkeypatch.setattr("opd.divergences.triton_backend.NARROW", (128, 4))
    monkeypatch.setattr("opd.divergences.compute.triton_plan", plan)


def budget(mode: str) -> int | None:
    return None if mode == "fast" else 1


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("mode", ["fast", "small"])
@pytest.mark.parametrize(("kind", "params"), [*CASES, ("detached_skew_reverse_kl", {"alpha": 0.1})])
def test_every_kind_matches_the_reference(kind: str, params: dict, mode: str) -> None:
    narrow = heads(1, torch.bfloat16, bias=False, softcap=None)
    exact = heads(1, torch.float64, bias=False, softcap=None)
    weight = torch.rand(N, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    found = run(narrow, kind, params, "", "triton", mode, memory=budget(mode), weight=weight)
    compare(found, run(exact, kind, params, "", "reference", mode, weight=weight), 8e-3 if kind in SMOOTH else 2e-2)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("mode", "gated"), [("fast", False), ("fast", True), ("small", True)])
@pytest.mark.parametrize("mixture", ["", "arithmetic", "geometric"])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("merge", [(), ((3, 300, 7), (250, 1))])
@pytest.mark.parametrize(("kind", "temperature"), [("reverse_kl", 1.0), ("jsd", 0.7)])
def test_options_match_the_reference(
    kind: str, temperature: float, merge: tuple, softcap: float | None, mixture: str, mode: str, gated: bool
) -> None:
    """fp32 inputs, so that nothing hides in rounding. Weights that are a function of the statistics close those chunk by
    chunk, others at the end."""

    def gate(rows: RowStatistics) -> torch.Tensor:
        return (rows.entropy > 1) * 0.5 + 0.01 * rows.index

    single = heads(4, torch.float32, bias=True, softcap=softcap)
    exact = heads(4, torch.float64, bias=True, softcap=softcap)
    tokens = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    tokens[:3] = torch.tensor([3, 7, 250], device=DEVICE)
    weight = gate if gated else torch.rand(N, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    options: dict[str, Any] = {"merge": merge, "temperature": temperature, "weight": weight, "tokens": tokens}
    found = run(single, kind, {}, mixture, "triton", mode, memory=budget(mode), **options)
    compare(found, run(exact, kind, {}, mixture, "reference", mode, **options), 2e-4)


def given_ids() -> torch.Tensor:
    """Some twice, some missing, one row without any."""
    ids = torch.randint(-1, V, (N, 12), generator=torch.Generator().manual_seed(6))
    ids[0, :4], ids[1] = torch.tensor([300, 7, 7, 0]), -1
    return ids.to(DEVICE)


SUPPORTS: list[tuple[dict[str, Any], str]] = [
    ({"support": "topk", "k": 9, "side": "teacher"}, ""),
    ({"support": "topk", "k": 9, "side": "student", "closure": "renormalised"}, "arithmetic"),
    ({"support": "topk", "k": 9, "side": "union", "closure": "generalised"}, "geometric"),
    ({"support": "ids", "closure": "tail"}, ""),
    ({"support": "topk", "k": 9, "closure": "teacher_renormalised"}, ""),
    ({"support": "topk", "k": 9, "with_sampled": True}, ""),
    ({"support": "topk", "k": 9, "side": "union", "closure": "renormalised", "with_sampled": True}, ""),
]


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("support", "mixture"), SUPPORTS)
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("merge", [(), ((3, 300, 7), (250, 1))])
@pytest.mark.parametrize(("kind", "temperature"), [("reverse_kl", 1.0), ("jsd", 0.7)])
def test_part_of_the_vocabulary_matches_the_reference(
    kind: str, temperature: float, merge: tuple, softcap: float | None, support: dict[str, Any], mixture: str
) -> None:
    options: dict[str, Any] = {**support, "merge": merge, "temperature": temperature}
    if support["support"] == "ids":
        options["ids"] = given_ids()
    options["weight"] = torch.rand(N, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    options["tokens"] = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    single, exact = (heads(4, dtype, bias=False, softcap=softcap) for dtype in (torch.float32, torch.float64))
    found = run(single, kind, {}, mixture, "triton", "fast", **options)
    compare(found, run(exact, kind, {}, mixture, "reference", "fast", **options), 2e-4)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(
    "options",
    [
        {"support": "ids", "merge": ((V + 70, 3, 7), (V + 1, V + 2), (V + 9, 250, 1))},
        {"support": "topk", "k": 9, "merge": ((V + 70, 3, 7),)},
        {"support": "topk", "k": 1, "merge": ((3, 7),)},
    ],
)
def test_a_support_with_groups_of_every_kind(options: dict[str, Any]) -> None:
    """Ids at or beyond the vocabulary do not exist: a group goes by the first that does."""
    if options["support"] == "ids":
        options = options | {"ids": given_ids()}
    single, exact = (heads(4, dtype, bias=False, softcap=None) for dtype in (torch.float32, torch.float64))
    found = run(single, "reverse_kl", {}, "", "triton", "fast", **options)
    compare(found, run(exact, "reverse_kl", {}, "", "reference", "fast", **options), 2e-4)


@pytest.mark.usefixtures("tiles")
def test_an_event_is_chosen_once() -> None:
    """Fewer ids than k are left beside it, in rows that are long enough for blocks to be looked through."""
    generator = torch.Generator().manual_seed(8)
    hidden, weight = torch.randn(2, 1, DS, generator=generator), torch.randn(2, 1100, DS, generator=generator) / 10
    for side, logit in enumerate((7.0, 6.0)):  # about as likely as all others together
        weight[side, -1] = hidden[side, 0] * logit / hidden[side, 0].square().sum()
    results = []
    for dtype, backend in ((torch.float32, "triton"), (torch.float64, "reference")):
        sides = [Projection(*(part.to(DEVICE, dtype) for part in pair)) for pair in zip(hidden, weight, strict=True)]
        for tensor in leaves(sides[0]):
            tensor.requires_grad_()
        options: dict[str, Any] = {"support": "topk", "k": 4, "closure": "none", "merge": (range(1099),)}
        results.append(run(sides, "reverse_kl", {}, "", backend, "fast", **options))
    compare(*results, 2e-4)


@pytest.mark.usefixtures("tiles")
def test_a_support_in_half_precision() -> None:
    """At the chosen ids the gradient is rounded once: it may be a small difference of two large parts."""
    options: dict[str, Any] = {"support": "topk", "k": 20, "merge": ((3, 300),)}
    narrow, exact = (heads(7, dtype, bias=False, softcap=None) for dtype in (torch.bfloat16, torch.float64))
    found = run(narrow, "reverse_kl", {}, "", "triton", "fast", **options)
    compare(found, run(exact, "reverse_kl", {}, "", "reference", "fast", **options), 8e-3)


def on_device(side: Projection, dtype: torch.dtype) -> Projection:
    found = Projection(*(part.detach().to(DEVICE, dtype) for part in (side.hidden, side.weight)))
    for tensor in leaves(found):
        tensor.requires_grad_(side.weight.requires_grad)
    return found


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("side", "merge"), [("teacher", ()), ("student", ((0, 2, 7), (3, 60))), ("union", ((5, 9),))])
@pytest.mark.parametrize(("kind", "params"), CASES)
def test_a_small_tail_is_exact_in_single_precision(kind: str, params: dict, side: str, merge: tuple) -> None:
    """Down to 4e-18, on either side or both, a row at a time: one minus the sum over the support would say nothing."""
    tails = [-2.0, -7.0, -12.5, -16.0, -26.0, -40.0, -40.0]
    pair = tailed(tails, [-40.3, -2.3, -26.0, -12.5, -16.0, -3.0, -39.0], torch.float64, 301)
    results = []
    for dtype, backend in ((torch.float32, "triton"), (torch.float64, "reference")):
        options: dict[str, Any] = {"support": "topk", "k": 8, "side": side, "merge": merge, "backend": backend}
        student, teacher = (on_device(one, dtype) for one in pair)
        found = divergence(kind, student, teacher, tokens=torch.arange(7, device=DEVICE), **options, **params)
        hidden, weight = torch.autograd.grad(found.loss, leaves(student))
        rows = [found.value[:, None], hidden, weight.T, found.entropy[:, None], found.reverse_kl[:, None]]
        results.append([part.double() for part in [*rows, found.statistics.logprob[:, None]]])  # type: ignore[index]
    for one, other in zip(*results, strict=True):
        assert ((one - other).norm(dim=1) <= 1e-4 * other.norm(dim=1) + 1e-5).all()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("merge", [(), ((3, 300, 7), (250, 1))])
def test_no_tail_where_the_support_is_everything(merge: tuple, softcap: float | None) -> None:
    """In some of the rows; one has no ids at all, one all but an event."""
    ids = torch.arange(V).repeat(N, 1)
    ids[1], ids[2, [3, 300, 7]], ids[3, 9:] = -1, -1, -1
    options: dict[str, Any] = {"support": "ids", "ids": ids.to(DEVICE), "merge": merge}
    for kind, params in (("reverse_kl", {}), ("alpha", {"alpha": 2.0})):
        single, exact = (heads(4, dtype, bias=False, softcap=softcap) for dtype in (torch.float32, torch.float64))
        found = run(single, kind, params, "", "triton", "fast", **options)
        compare(found, run(exact, kind, params, "", "reference", "fast", **options), 2e-4)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("mode", ["fast", "small"])
def test_logits_that_rise_steeply_do_not_overflow(mode: str) -> None:
    """The last columns lie hundreds of nats above the first, by which sums are scaled until that is noticed."""
    results = []
    for dtype, backend in ((torch.float32, "triton"), (torch.float64, "reference")):
        sides = heads(11, dtype, bias=True, softcap=None)
        for side in sides:
            assert side.bias is not None
            side.bias.data[100:300] += torch.linspace(0, 400, 200, dtype=dtype, device=DEVICE)
        results.append(run(sides, "jsd", {}, "", backend, mode, memory=budget(mode)))
    compare(*results, 1e-3)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("mode", ["fast", "small"])
def test_equality_is_zero(mode: str) -> None:
    student = heads(5, torch.float32, bias=False, softcap=None)[0]
    for kind, params in CASES:
        if kind in SMOOTH:
            found = run([student, student.detach()], kind, params, "", "triton", mode, memory=budget(mode))
            assert found["value"].abs().max() < 3e-6, kind
            assert max(float(found[f"gradient {index}"].abs().max()) for index in range(2)) < 1e-4, kind


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of the passes without a divergence's gradient."""
    monkeypatch.setattr("opd.divergences.compute.VALUES_TILE_BYTES", ROWS * 4 * V)
    monkeypatch.setattr("opd.divergences.compute.CHUNK_BYTES", ROWS * 4 * V)
    monkeypatch.setattr("opd.divergences.triton_backend.NARROW", (128, 4))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"merge": ((3, 300, 7), (250, 1)), "temperature": 0.7},
    {"merge": ((3, 7),), "softcap": 4.0},
]


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 8e-3)])
def test_logprobs_match_the_torch_backend(dtype: torch.dtype, tolerance: float, options: dict[str, Any]) -> None:
    options, softcap = {**options}, options.get("softcap")
    options.pop("softcap", None)
    tokens = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    tokens[:3] = torch.tensor([3, 7, 250], device=DEVICE)
    upstream = torch.randn(N, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    results = []
    for own in (dtype, torch.float64):
        student = heads(12, own, bias=True, softcap=softcap)[0]
        found = token_logprobs(student, tokens, **options)
        assert ("Triton" in type(found.grad_fn).__name__) == (own == dtype)
        gradients = torch.autograd.grad((found * upstream.to(found)).sum(), leaves(student))
        results.append({"logprob": found, **{f"gradient {number}": grad for number, grad in enumerate(gradients)}})
    compare(*results, tolerance)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("teachers", [0, 1, 2])
def test_statistics_match_the_torch_backend(teachers: int, options: dict[str, Any]) -> None:
    options, softcap = {**options}, options.get("softcap")
    options.pop("softcap", None)
    tokens = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    results = []
    for dtype in (torch.float32, torch.float64):
        student, *others = heads(13, dtype, bias=True, softcap=softcap)
        teacher: Any = [None, others[0], Mixture(others, [0.4, 0.6])][teachers]
        found = statistics(student, teacher, kind="jsd", tokens=tokens, **options)
        results.append({name: value for name, value in vars(found).items() if value is not None})
    compare(*results, 0.0)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("mode", ["fast", "small"])
def test_runs_are_identical(mode: str) -> None:
    first, second = (
        run(heads(6, torch.bfloat16, bias=True, softcap=None), "jsd", {}, "", "triton", mode, memory=budget(mode))
        for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("n", [0, 1])
def test_no_rows_and_one_row(n: int) -> None:
    found = run(heads(7, torch.bfloat16, bias=False, softcap=None, n=n), "reverse_kl", {}, "", "triton", "fast")
    assert found["value"].shape == (n,)


def test_a_frozen_head_gets_no_gradient() -> None:
    student, teacher, _ = heads(8, torch.bfloat16, bias=False, softcap=None)
    frozen = Projection(student.hidden, student.weight.detach(), None, 1.2, None, V)
    found = divergence("reverse_kl", frozen, teacher, backend="triton")
    exact = divergence("reverse_kl", frozen, teacher, backend="chunked")
    grads = [torch.autograd.grad(one.loss, student.hidden)[0].double() for one in (found, exact)]
    assert (grads[0] - grads[1]).norm() < 1e-2 * grads[1].norm()


def test_a_budget_too_small_is_rejected_and_says_what_it_needs() -> None:
    student, teacher, _ = heads(9, torch.bfloat16, bias=False, softcap=None)
    with pytest.raises(ValueError, match="raise memory by"):
        divergence("reverse_kl", student, teacher, backend="triton", memory=1000)
