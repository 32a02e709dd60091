"""Tiles of the CUDA backend: raw products of some rows and columns, and how a kernel reads logits from them.

Axis legend: n = rows of a tile, C = its columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from opd.divergences import triton_kernels as kernels
from opd.divergences.mixture import Mixture, Source
from opd.divergences.projection import LOG_ZERO, Projection, matmul

# Columns and warps of one step of a row kernel, for wide tiles and slabs; `benchmarks/divergence.py --sweep` tries
# others
WIDE, WIDE_SUMS, WIDE_FORWARD, NARROW = (2048, 16), (2048, 8), (1024, 8), (512, 4)
NARROW_COLUMNS = 16384
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class LogitReading:
    """How a kernel turns a side's raw values into logits: constants and the bias of the tile's columns."""

    bias: Tensor | None
    scale: float
    cap: float
    softcap: bool

    @classmethod
    def of(cls, source: Source, columns: slice, temperature: float) -> LogitReading:
        if isinstance(source, Mixture):  # its tile holds finished logits
            return cls(None, 1.0, 1.0, False)
        bias = None if source.bias is None else source.bias[columns]
        if source.softcap is None:
            return cls(bias, source.scale / temperature, 1.0, False)
        return cls(bias, source.scale / source.softcap, source.softcap / temperature, True)

    def in_base_2(self) -> LogitReading:
        """The same logits, divided by log 2: exponentials are powers of two on the GPU."""
        if self.softcap:
            return replace(self, cap=self.cap * LOG2_E)
        return replace(self, scale=self.scale * LOG2_E)


@dataclass(frozen=True, eq=False)
class Tile:
    """Raw values of both sides for some rows and columns, with merged ids already blanked."""

    rows: slice
    columns: slice
    student: Tensor  # (n, C) fp32
    teacher: Tensor  # (n, C) fp32
    s: LogitReading
    t: LogitReading

    def launch(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        n, width = self.student.shape
        wide = WIDE_SUMS if kernel is kernels.sums_kernel else WIDE_FORWARD if constants.get("FORWARD") else WIDE
        block, warps = NARROW if width <= NARROW_COLUMNS else wide
        s, t = self.s, self.t
        kernel[(n,)](
            self.student,
            self.teacher,
            self.student.stride(0),
            self.teacher.stride(0),
            self.student if s.bias is None else s.bias,
            self.teacher if t.bias is None else t.bias,
            *arguments,
            columns_total=width,
            s_scale=s.scale,
            s_cap=s.cap,
            t_scale=t.scale,
            t_cap=t.cap,
            S_BIAS=s.bias is not None,
            T_BIAS=t.bias is not None,
            S_SOFTCAP=s.softcap,
            T_SOFTCAP=t.softcap,
            **constants,
            BLOCK=block,
            num_warps=warps,
        )

    def fold_into(self, state: Tensor, forward: bool, both: bool = True) -> None:
        """Add this tile to the running sums (8, N) of its rows; with `both` unset, the student's alone."""
        tile = replace(self, s=self.s.in_base_2(), t=self.t.in_base_2())
        tile.launch(kernels.statistics_kernel, state[:, self.rows], state.stride(0), FORWARD=forward, BOTH=both)


def initial_state(state: Tensor) -> Tensor:
    """Eight running values per row: (max, sum, sum e z, sum e (z - other)) of the student, then the teacher; in base
    2.
    """
    state.zero_()
    state[0] = LOG_ZERO
    state[4] = LOG_ZERO
    return state


def project(source: Projection, rows: slice, columns: slice, out: Tensor) -> None:
    """Raw products of a head into a tile."""
    matmul(source.hidden[rows], source.weight[columns].T, out=out)
