"""One exact divergence with all its gradients, from hidden states: opd against naive torch, TRL and Liger.

    pip install --no-deps trl==1.16.0 liger-kernel==0.8.5    # never dependencies of opd; without them they are left out
    python benchmarks/divergence.py                          # CUDA: writes benchmarks/results/divergence-cuda.json
    python benchmarks/divergence.py --device cpu             # writes benchmarks/results/divergence-cpu.json
    python benchmarks/divergence.py --scaling                # time and memory against N, V and the number of teachers
    python benchmarks/divergence.py --profile                # where the time goes, kernel by kernel
    python benchmarks/divergence.py --sweep                  # block sizes and chunks of the CUDA backend

A call is value, dHidden and dWeight, forward and backward. Time is the median of event-timed calls after warm-up; peak
memory is what the call allocates above what was there before it, gradients included. The gradient error is against
fp64 at N = 512. The floor is three student products and one teacher product at the rate measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from opd.divergences import Mixture, Projection, divergence, token_logprobs
from opd.divergences import statistics as row_statistics

RESULTS = Path(__file__).parent / "results"
KINDS: dict[str, dict[str, float]] = {"reverse_kl": {}, "forward_kl": {}, "jsd": {"beta": 0.5}}
BETA = {"reverse_kl": 1.0, "forward_kl": 0.0, "jsd": 0.5}
N, V, DT = 8192, 151936, 4096
SMALL_BUDGET = {1024: int(0.88 * 2**30), 2048: int(1.4 * 2**30)}  # just too little for `fast`
TABLE_BUDGET = {
    1024: int(1.3 * 2**30),
    2048: int(2.2 * 2**30),
}  # what the planner makes of it is `fast`, in smaller chunks
Call = Callable[[], Tensor]


def inputs(
    n: int, v: int, ds: int, dt: int, device: str, dtype: torch.dtype, teachers: int = 1
) -> list[tuple[Tensor, Tensor]]:
    """(hidden, weight) of the student and of each teacher; logits spread like a language model's, the teacher near the
    student in none of them: the products cost the same whatever the values."""
    generator = torch.Generator(device=device).manual_seed(n + v + ds)
    found = []
    for width in (ds, *[dt] * teachers):
        hidden = torch.randn(n, width, generator=generator, device=device).to(dtype)
        weight = (torch.randn(v, width, generator=generator, device=device) * (2.0 / width**0.5)).to(dtype)
        found.append((hidden, weight))
    for tensor in found[0]:
        tensor.requires_grad_()
    return found


def opd_call(heads: list[tuple[Tensor, Tensor]], kind: str, memory: int | None = None, backend: Any = "auto") -> Call:
    student, *teachers = (Projection(*head) for head in heads)
    teacher: Any = teachers[0] if len(teachers) == 1 else Mixture(teachers, [1.0] * len(teachers))
    return lambda: divergence(kind, student, teacher, memory=memory, backend=backend, **KINDS[kind]).loss  # type: ignore[arg-type]


def naive_call(heads: list[tuple[Tensor, Tensor]], kind: str, dtype: torch.dtype | None = None) -> Call:
    """What one writes first: whole logits, log_softmax in fp32, autograd."""
    from opd.divergences.kinds import FORMULAS

    (hidden, weight), (hidden_t, weight_t) = heads[:2]
    wide = dtype or torch.float32

    def call() -> Tensor:
        log_s = (hidden @ weight.T).to(wide).log_softmax(-1)
        with torch.no_grad():
            log_t = (hidden_t @ weight_t.T).to(wide).log_softmax(-1)
        return FORMULAS[kind](log_s, log_t, **KINDS[kind]).sum()

    return call


def trl_call(heads: list[tuple[Tensor, Tensor]], kind: str) -> Call:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    (hidden, weight), (hidden_t, weight_t) = heads[:2]
    beta = BETA[kind]
    return lambda: ChunkedDivergenceFunction.apply(hidden, weight, None, hidden_t, weight_t, None, beta)[0].sum()  # noqa: PLW0108


def liger_call(heads: list[tuple[Tensor, Tensor]], kind: str) -> Call:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    (hidden, weight), (hidden_t, weight_t) = heads[:2]
    labels = torch.zeros(hidden.shape[0], dtype=torch.long, device=hidden.device)
    loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=BETA[kind])
    return lambda: loss(hidden, weight, hidden_t, weight_t, labels) * hidden.shape[0]


def liger_fused_call(heads: list[tuple[Tensor, Tensor]], kind: str) -> Call:
    """Its kernel of whole rows, with the head's gradient summed in fp32."""
    from liger_kernel.transformers import LigerFusedLinearJSD

    (hidden, weight), (hidden_t, weight_t) = heads[:2]
    loss = LigerFusedLinearJSD(jsd_beta=BETA[kind], accum_dtype=torch.float32)
    return lambda: loss(hidden, weight, hidden_t, weight_t, None) * hidden.shape[0]


def liger_kl_call(heads: list[tuple[Tensor, Tensor]], kind: str) -> Call:
    """Forward KL to probabilities that are given: those of the teacher, which it would have to hold, are made in the call."""
    from liger_kernel.transformers import LigerFusedLinearKLDivLoss

    (hidden, weight), (hidden_t, weight_t) = heads[:2]
    loss = LigerFusedLinearKLDivLoss(reduction="sum", accum_dtype=torch.float32)

    def call() -> Tensor:
        with torch.no_grad():
            given = (hidden_t @ weight_t.T).float().softmax(-1)
        return loss(hidden, weight, given)

    return call


PEERS: dict[str, tuple[str, Callable[..., Call], list[str]]] = {  # package, call, divergences
    "TRL": ("trl", trl_call, list(KINDS)),
    "Liger": ("liger-kernel", liger_call, list(KINDS)),
    "Liger, rows in a kernel, fp32 sums": ("liger-kernel", liger_fused_call, list(KINDS)),
    "Liger, KL to given probabilities, fp32 sums": ("liger-kernel", liger_kl_call, ["forward_kl"]),
}


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def offer_datasets_stub() -> None:
    """TRL's kernels import its trainer utilities, which want `datasets`; a machine without it gets an empty stand-in."""
    if installed("datasets") is None and "datasets" not in sys.modules:
        stub = ModuleType("datasets")
        stub.IterableDataset = stub.Dataset = type("Dataset", (), {})  # type: ignore[attr-defined]
        sys.modules["datasets"] = stub


def timed(call: Call, leaves: list[Tensor], repeats: int = 10, warm: int = 3, rest: float = 0.0) -> dict[str, float]:
    """Median milliseconds of forward and backward on the GPU, and the peak above what was allocated before, in GiB.

    Calls run back to back, where the card's power limit holds its clocks down; `rest` seconds before each of a second
    round give the time without that.
    """

    def once() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        found = call()
        grads = torch.autograd.grad(found, leaves) if leaves else ()
        end.record()
        torch.cuda.synchronize()
        del grads, found
        return start.elapsed_time(end)

    for _ in range(warm):
        once()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = [once() for _ in range(repeats)]
    peak = torch.cuda.max_memory_allocated() - before
    found = {"ms": statistics.median(times), "ms_best": min(times), "peak_gib": peak / 2**30}
    if rest:
        rested = []
        for _ in range(repeats // 2):
            time.sleep(rest)
            rested.append(once())
        found["ms_rested"] = statistics.median(rested)
    return {name: round(value, 3) for name, value in found.items()}


def gradient_error(
    make: Callable[[list[tuple[Tensor, Tensor]]], Call], heads: list[tuple[Tensor, Tensor]], kind: str
) -> float:
    """Relative error of dWeight and dHidden together, against fp64 on the same inputs."""
    exact_heads = [(hidden.detach().double(), weight.detach().double()) for hidden, weight in heads]
    for tensor in exact_heads[0]:
        tensor.requires_grad_()
    exact = torch.autograd.grad(naive_call(exact_heads, kind, torch.float64)(), exact_heads[0])
    found = torch.autograd.grad(make(heads)(), heads[0])
    errors = [((one.double() - two).norm() / two.norm()).item() for one, two in zip(found, exact, strict=True)]
    return max(errors)


def product_rate(n: int = 8192, v: int = 16384, d: int = 4096) -> float:
    """TFLOP/s of a large bf16 product on random data."""
    a, b = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((n, d), (v, d)))
    for _ in range(5):
        a @ b.T
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(20):
        a @ b.T
    end.record()
    torch.cuda.synchronize()
    return 2 * n * v * d * 20 / start.elapsed_time(end) / 1e9


def products_call(heads: list[tuple[Tensor, Tensor]], chunk: int = 1536) -> Call:
    """The four products of `fast` alone, on the same pieces: the floor under the same load as the calls themselves."""
    (hidden, weight), (hidden_t, weight_t) = ([tensor.detach() for tensor in head] for head in heads[:2])
    own, other = torch.empty(2, chunk, weight.shape[0], device="cuda")
    total = torch.zeros_like(weight, dtype=torch.float32)

    def call() -> Tensor:
        for start in range(0, hidden.shape[0], chunk):
            h, t = hidden[start : start + chunk], hidden_t[start : start + chunk]
            torch.mm(t, weight_t.T, out_dtype=torch.float32, out=other[: len(t)])
            torch.mm(h, weight.T, out_dtype=torch.float32, out=own[: len(h)])
            grad = own[: len(h)].view(torch.bfloat16)[:, : weight.shape[0]]
            torch.mm(grad, weight, out_dtype=torch.float32)
            torch.addmm(total, grad.T, h, out_dtype=torch.float32, out=total)
        return total

    return call


def implementations(ds: int, kind: str, peers: bool) -> dict[str, Callable[..., Call]]:
    found: dict[str, Callable[..., Call]] = {
        "opd fast": opd_call,
        "opd small": lambda heads, kind: opd_call(heads, kind, memory=SMALL_BUDGET.get(ds, 2**30)),
        "opd budget": lambda heads, kind: opd_call(heads, kind, memory=TABLE_BUDGET.get(ds, 2**31)),
        "naive torch": naive_call,
    }
    for name, (package, call, kinds) in PEERS.items():
        if peers and installed(package) and kind in kinds:
            found[name] = call
    return found


def table_cuda(kinds: list[str], widths: list[int], peers: bool) -> dict[str, Any]:
    first, rate = first_call(), product_rate()
    rows: list[dict[str, Any]] = []
    for ds in widths:
        floor = 2 * N * V * (3 * ds + DT) / rate / 1e9
        heads, few = inputs(N, V, ds, DT, "cuda", torch.bfloat16), inputs(512, V, ds, DT, "cuda", torch.bfloat16)
        rows.append({"implementation": "products alone", "ds": ds, **timed(products_call(heads), [], rest=0.15)})
        print(json.dumps(rows[-1]), flush=True)
        for kind in kinds:
            for name, make in implementations(ds, kind, peers).items():
                row = {"implementation": name, "kind": kind, "ds": ds, "floor_ms": round(floor, 2)}
                row |= timed(make(heads, kind), list(heads[0]), rest=0.15)
                row["gradient_error"] = round(gradient_error(partial(make, kind=kind), few, kind), 6)
                rows.append(row)
                print(json.dumps(row), flush=True)
                torch.cuda.empty_cache()
    return {"n": N, "v": V, "dt": DT, "tflops": round(rate, 1), "first_call_s": first, "rows": rows, "values": values()}


def values(ds: int = 1024) -> list[dict[str, Any]]:
    """What shares the machinery: log-probs of tokens, passes without a gradient, part of the vocabulary."""
    heads = inputs(N, V, ds, DT, "cuda", torch.bfloat16)
    student, teacher = (Projection(*head) for head in heads)
    ids = torch.randint(0, V, (N,), generator=torch.Generator(device="cuda").manual_seed(0), device="cuda")
    cases: dict[str, tuple[Call, list[Tensor]]] = {
        "token_logprobs, value": (lambda: token_logprobs(student.detach(), ids, trusted=True), []),
        "token_logprobs, value and gradients": (
            lambda: token_logprobs(student, ids, trusted=True).sum(),
            list(heads[0]),
        ),
        "statistics of the student": (lambda: row_statistics(student).entropy, []),
        "statistics of both": (lambda: row_statistics(student, teacher).entropy, []),
    }
    for side in ("teacher", "student", "union"):
        cases[f"reverse_kl on the top 100 of {side}"] = (
            lambda side=side: divergence("reverse_kl", student, teacher, support="topk", k=100, side=side).loss,  # type: ignore[misc]
            list(heads[0]),
        )
    rows = []
    for name, (call, leaves) in cases.items():
        rows.append({"what": name, "ds": ds, **timed(call, leaves, repeats=5, warm=2)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def first_call() -> float:
    """Seconds of the first call of a fresh process with nothing compiled yet, minus those of the second."""
    heads, times = inputs(512, V, 1024, DT, "cuda", torch.bfloat16), []
    (heads[0][0] @ heads[0][1].T).sum().item()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for _ in range(2):
            start = time.perf_counter()
            torch.autograd.grad(opd_call(heads, "jsd")(), heads[0])
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return round(times[0] - times[1], 2)


def scaling() -> dict[str, Any]:
    """Time and memory of both modes against each size in turn; Ds = 1024, Dt = 2048, reverse KL (JSD for mixtures' sake)."""
    from opd.divergences import compute

    rows: list[dict[str, Any]] = []
    chosen: Any = compute.triton_plan
    cases = [("N", n, 65536, 1) for n in (1024, 4096, 16384, 65536)]
    cases += [("V", 8192, v, 1) for v in (16384, 32768, 65536, 131072, 262144)]
    cases += [("teachers", 4096, 65536, count) for count in (1, 2, 3, 4)]
    for axis, n, v, teachers in cases:
        heads = inputs(n, v, 1024, 2048, "cuda", torch.bfloat16, teachers)
        gradients = 2 * (n + v) * 1024
        for mode in ("fast", "small"):
            small: Any = lambda student, size, _: compute.small_plan(student, size, 2**40)  # noqa: E731
            compute.triton_plan = chosen if mode == "fast" else small
            found = timed(opd_call(heads, "reverse_kl"), list(heads[0]), repeats=5, warm=2)
            found["beyond_gradients_gib"] = round(found["peak_gib"] - gradients / 2**30, 3)
            rows.append({"axis": axis, "n": n, "v": v, "teachers": teachers, "mode": mode, **found})
            print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    return {"ds": 1024, "dt": 2048, "rows": rows}


def profile(ds: int, kind: str, memory: int | None) -> list[dict[str, Any]]:
    """Device time by kernel of one call."""
    heads = inputs(N, V, ds, DT, "cuda", torch.bfloat16)
    call = opd_call(heads, kind, memory)
    for _ in range(2):
        torch.autograd.grad(call(), heads[0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        torch.autograd.grad(call(), heads[0])
        torch.cuda.synchronize()
    events = sorted(prof.key_averages(), key=lambda event: -event.self_device_time_total)[:14]
    return [
        {"kernel": event.key[:90], "calls": event.count, "ms": round(event.self_device_time_total / 1e3, 3)}
        for event in events
    ]


def sweep(ds: int) -> list[dict[str, Any]]:
    """Steps of the row kernels, chunks of `fast` and tiles of `small`."""
    from opd.divergences import compute, triton_backend

    heads, found = inputs(N, V, ds, DT, "cuda", torch.bfloat16), []

    def measure(memory: int | None = None, kind: str = "reverse_kl", **labels: Any) -> None:
        found.append({**labels, "kind": kind, **timed(opd_call(heads, kind, memory), list(heads[0]), 5, 2)})
        print(json.dumps(found[-1]), flush=True)

    usual = triton_backend.WIDE, compute.FAST_TILE_BYTES
    for steps in ((1024, 4), (1024, 8), (2048, 8), (4096, 16)):
        triton_backend.WIDE = steps
        for kind in ("reverse_kl", "jsd"):
            measure(kind=kind, steps=steps)
    triton_backend.WIDE = usual[0]
    for rows in (768, 1152, 1536, 2048):
        compute.FAST_TILE_BYTES = rows * 8 * V
        measure(chunk=rows)
    compute.FAST_TILE_BYTES = usual[1]
    for rows, slab in ((8192, 8192), (4096, 16384), (4096, 8192), (2048, 32768), (2048, 16384)):
        compute.SMALL_ROWS, compute.SMALL_SLAB = rows, slab
        measure(SMALL_BUDGET[ds], tile=(rows, slab))
    return found


def cpu_worker(name: str, n: int, v: int, ds: int, dt: int) -> None:
    """One implementation in a process of its own, so that its peak resident memory is its own; prints a JSON line."""
    torch.set_num_threads(1)
    heads = inputs(n, v, ds, dt, "cpu", torch.float32)
    call = naive_call(heads, "reverse_kl") if name == "naive torch" else opd_call(heads, "reverse_kl")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for _ in range(3):
        start = time.process_time()
        grads = torch.autograd.grad(call(), heads[0])
        times.append(time.process_time() - start)
        check = [
            float(grad.double().norm()) if grad.numel() < 2**22 else float(grad.pow(2).sum(-1).double().sum().sqrt())
            for grad in grads
        ]
        del grads  # a call's peak holds its own gradients, not the last one's too
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(
        json.dumps({"implementation": name, "seconds": round(min(times), 2), "peak_mib": peak // 1024, "norms": check})
    )


def table_cpu(n: int, v: int, ds: int = 576, dt: int = 576) -> dict[str, Any]:
    rows = []
    for name in (
        "naive torch",
        "opd chunked",
        "naive torch",
        "opd chunked",
    ):  # in turns: other work disturbs both alike
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import divergence as d; d.cpu_worker({name!r}, {n}, {v}, {ds}, {dt})"
        output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        rows.append(json.loads(output.strip().splitlines()[-1]))
        print(rows[-1], flush=True)
    return {"n": n, "v": v, "ds": ds, "dt": dt, "dtype": "float32", "threads": 1, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--widths", nargs="+", type=int, default=[1024, 2048])
    parser.add_argument("--tokens", type=int, default=2048, help="CPU")
    parser.add_argument("--vocabulary", type=int, default=49152, help="CPU")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    name = "divergence"
    if arguments.scaling:
        name, found = "divergence-scaling", scaling()
    elif arguments.profile:
        runs = {
            (mode, kind): profile(1024, kind, memory)
            for mode, memory in (("fast", None), ("small", SMALL_BUDGET[1024]))
            for kind in arguments.kinds
        }
        name, found = "divergence-profile", {f"{mode} {kind}": rows for (mode, kind), rows in runs.items()}
    elif arguments.sweep:
        name, found = "divergence-sweep", {"rows": sweep(1024)}
    elif arguments.device == "cpu":
        found = table_cpu(arguments.tokens, arguments.vocabulary)
    else:
        offer_datasets_stub()
        found = table_cuda(arguments.kinds, arguments.widths, not arguments.no_peers)
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine()
    packages = {package: installed(package) for package in ("torch", "triton", "trl", "liger-kernel")}
    command = " ".join(["python", *sys.argv])
    record = {"command": command, "machine": machine, "python": platform.python_version(), **packages, **found}
    out = arguments.out or RESULTS / f"{name}-{arguments.device}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written: {out}")


if __name__ == "__main__":
    main()
