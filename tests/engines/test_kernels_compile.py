"""Kernels of the sampler and of divergences, compiled for GPUs that are not here. `make test-kernels` runs these."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]
HALF, WIDE, DOUBLE, LONG, WORD = "*bf16", "*fp32", "*fp64", "*i64", "*i32"
TILE = {"WIDTH": 1024, "TALL": 64, "WIDE": 32, "DEEP": 128}
SMALL = {"WIDTH": 576, "TALL": 16, "WIDE": 32, "DEEP": 64}
WEIGHTS = {name: HALF for name in ("weight_1", "weight_2", "weight_3", "bias_1", "bias_2", "bias_3")}
ROWS = {"logits": WIDE, "temperature": WIDE, "found": DOUBLE, "stride": "i32", "size": "i32", "pieces": "i32"}
PICKED = ROWS | {"keys": LONG, "positions": LONG, "stop": LONG, "out": DOUBLE, "rows": "i32"}
CACHE = {"keys": HALF, "values": HALF, "column": LONG, "cache_slot": "i32", "cache_head": "i32", "cache_column": "i32"}
PLACED = CACHE | {
    "joined": HALF,
    "cos": HALF,
    "sin": HALF,
    "query_gain": HALF,
    "key_gain": HALF,
    "query": HALF,
    "eps": "fp32",
    "turn_row": "i32",
}
HEADS = {"HEADS": 16, "GROUPS": 8, "HALF": 64, "LANES": 64, "OFFSET": 0.0, "EARLY": True}
NORM = {"stream": HALF, "change": HALF, "weight": HALF, "out": HALF, "eps": "fp32"}
STATE = {"state_ptr": WIDE, "state_stride": "i32"}
SIDES = {"s_ptr": WIDE, "t_ptr": WIDE, "s_stride": "i32", "t_stride": "i32"}
READ = {name: "fp32" for name in ("s_scale", "s_cap", "t_scale", "t_cap")}
EVENTS = {"s_event_ptr": WIDE, "t_event_ptr": WIDE, "events": "i32"}
SUMS = {"phi_ptr": WIDE, "slope_ptr": WIDE, "factor_ptr": WIDE, "a": "fp32"}
OVER = {"grad_ptr": HALF, "grad_stride": "i32"}
SCANNED = {"values": WIDE, "stride": "i32", "columns": "i32"}

# module, kernel, types of its arguments, its constants, warps, stages
KERNELS: list[tuple[str, str, dict[str, str], dict[str, Any], int, int]] = [
    *(
        ("engines.kernels", "joined_kernel", {"x": HALF, **WEIGHTS, "out": HALF, "rows": "i32"}, constants, 4, 3)
        for constants in (
            {"END_1": 2048, "END_2": 3072, "COUNT": 4096, "BIAS": True, **TILE},
            {"END_1": 576, "END_2": 768, "COUNT": 960, "BIAS": False, **SMALL},
        )
    ),
    (
        "engines.kernels",
        "gated_kernel",
        {"x": HALF, "gate": HALF, "up": HALF, "out": HALF, "rows": "i32"},
        {"COUNT": 3072, **TILE},
        4,
        3,
    ),
    *(
        (
            "engines.kernels",
            "add_norm_kernel",
            NORM,
            {"WIDTH": 1024, "LANES": 1024, "ADDS": adds, "OFFSET": 0.0, "EARLY": True},
            2,
            1,
        )
        for adds in (True, False)
    ),
    *(("engines.kernels", "place_kernel", PLACED, HEADS | {"NORMED": normed}, 1, 1) for normed in (True, False)),
    *(
        (
            "engines.kernels",
            "pieces_kernel",
            ROWS | {"keep": keep},
            {"FILTERED": keep == "*i8", "PIECE": 4096},
            8,
            1,
        )
        for keep in (DOUBLE, "*i8")
    ),
    *(
        (
            "engines.kernels",
            "pick_kernel",
            PICKED | {"keep": DOUBLE},
            {"FILTERED": False, "STOPS": stops, "STOP_LANES": max(stops, 1), "PIECES": 64, "PIECE": 4096},
            8,
            1,
        )
        for stops in (0, 2)
    ),
    (
        "divergences.triton_kernels",
        "maxima_kernel",
        SCANNED | {"maxima": WIDE, "blocks": "i32"},
        {"BLOCKS": 64, "BLOCK": 64},
        4,
        1,
    ),
    (
        "divergences.triton_kernels",
        "blocks_kernel",
        {"maxima": WIDE, "chosen": WORD, "blocks": "i32", "k": "i32"},
        {"LANES": 4096},
        8,
        1,
    ),
    (
        "divergences.triton_kernels",
        "columns_kernel",
        SCANNED | {"chosen": WORD, "found": WIDE, "ids": LONG, "k": "i32"},
        {"LANES": 8192, "BLOCK": 64},
        16,
        1,
    ),
    *(
        (
            "divergences.triton_kernels",
            "gradient_kernel",
            SIDES | STATE | SUMS | OVER | READ | {"s_bias": WIDE, "t_bias": WIDE, "columns_total": "i32"},
            {"S_BIAS": False, "T_BIAS": False, "S_SOFTCAP": False, "T_SOFTCAP": False, "KIND": kind, "BLOCK": 2048},
            16,
            1,
        )
        for kind in range(9)
    ),
    *(
        (
            "divergences.triton_kernels",
            "event_gradient_kernel",
            EVENTS | STATE | SUMS | {"event_grad_ptr": WIDE},
            {"KIND": kind, "LANES": 2},
            1,
            1,
        )
        for kind in range(9)
    ),
    *(
        (
            "divergences.triton_kernels",
            "close_kernel",
            STATE | {"out_ptr": WIDE, "count": "i32"},
            {"BOTH": both, "BLOCK": 256},
            4,
            1,
        )
        for both in (False, True)
    ),
    *(
        (
            "divergences.triton_kernels",
            "chosen_kernel",
            SIDES
            | STATE
            | EVENTS
            | READ
            | {"ids_ptr": LONG, "first_ptr": LONG, "s_out_ptr": WIDE, "t_out_ptr": WIDE, "k": "i32", "columns": "i32"},
            {"S_SOFTCAP": capped, "T_SOFTCAP": capped, "LANES": 128},
            2,
            1,
        )
        for capped in (False, True)
    ),
    (
        "divergences.triton_kernels",
        "tail_kernel",
        STATE | {"rest_ptr": WIDE, "count": "i32", "s_out_ptr": WIDE, "t_out_ptr": WIDE, "k": "i32"},
        {"LANES": 64},
        1,
        1,
    ),
    *(
        (
            "divergences.triton_kernels",
            "chosen_gradient_kernel",
            STATE
            | OVER
            | {name: LONG for name in ("ids_ptr", "first_ptr")}
            | {name: WIDE for name in ("slope_ptr", "total_ptr", "outside_ptr", "logprob_ptr", "rest_ptr", "event_ptr")}
            | {"event_grad_ptr": WIDE, "rest_stride": "i32", "width": "i32"}
            | {"k": "i32", "columns": "i32", "events": "i32", "factor": "fp32", "cap": "fp32"},
            {"SOFTCAP": capped, "LANES": 128},
            2,
            1,
        )
        for capped in (False, True)
    ),
    *(
        (
            "divergences.triton_kernels",
            "members_kernel",
            OVER
            | {name: LONG for name in ("of_event_ptr", "place_ptr", "ids_ptr")}
            | {name: WIDE for name in ("event_grad_ptr", "share_ptr", "logit_ptr")}
            | {name: "i32" for name in ("start", "count", "events", "members")}
            | {"factor": "fp32", "cap": "fp32"},
            {"SOFTCAP": capped, "LANES": 2},
            1,
            1,
        )
        for capped in (False, True)
    ),
]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("module", "name", "types", "constants", "warps", "stages"), KERNELS)
def test_kernels_compile(
    module: str, name: str, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int, capability: int
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = vars(importlib.import_module(f"opd.{module}"))[name]
    assert types.keys() | constants.keys() == set(kernel.arg_names)
    source = ASTSource(
        kernel,
        {argument: types.get(argument, "constexpr") for argument in kernel.arg_names},
        {(number,): constants[argument] for number, argument in enumerate(kernel.arg_names) if argument in constants},
        {
            (number,): [["tt.divisibility", 16]]
            for number, argument in enumerate(kernel.arg_names)
            if types.get(argument, "").startswith("*")
        },
    )
    found = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps, "num_stages": stages}
    )
    assert found.metadata.shared <= 99 * 1024  # what the smallest card of these has for one block


@pytest.mark.parametrize("name", ["event_gradient_kernel", "chosen_kernel", "chosen_gradient_kernel", "members_kernel"])
def test_kernels_compile_for_one_event(name: str) -> None:
    """The usual number: a kernel has it as a constant then, like every 1."""
    module, _, types, constants, warps, stages = next(row for row in KERNELS if row[1] == name)
    single = {one: 1 for one in ("events", "count") if one in types}
    left = {argument: kind for argument, kind in types.items() if argument not in single}
    lanes = {"LANES": 1} if name in ("event_gradient_kernel", "members_kernel") else {}
    test_kernels_compile(module, name, left, constants | single | lanes, warps, stages, 90)
