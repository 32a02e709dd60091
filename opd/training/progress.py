"""What a run shows while it works: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

SPARKS = "▁▂▃▄▅▆▇█"


class Progress:
    """Use as a context manager; feed it metrics. `quiet` prints nothing (Python API, tests); `log` gets every line."""

    def __init__(self, console: Console, log: Path, quiet: bool = False) -> None:
        self._console, self._log, self._quiet = console, log, quiet
        self._stage, self._steps, self._done, self._phase = "", 0, 0, ""  # done: steps of an earlier process
        self._tokens, self._last_line, self._started = 0, 0.0, time.monotonic()
        self._metrics: dict[str, Any] = {}
        self._history: list[float] = []
        self._scores: list[float] = []
        self._phase_started = time.monotonic()
        self._live = (
            Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._render)
            if console.is_terminal and not quiet
            else None
        )

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, line: str) -> None:
        self._write(line)
        if not self._quiet:
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _write(self, line: str) -> None:
        with self._log.open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

    def show(self, renderable: Any) -> None:
        if not self._quiet:
            self._console.print(renderable)

    def start_stage(self, name: str, steps: int, done: int = 0) -> None:
        self._stage, self._steps, self._done, self._metrics = name, steps, done, {}
        self._history, self._scores = [], []
        self._started = time.monotonic()

    def phase(self, name: str) -> None:
        self._phase, self._tokens, self._phase_started = name, 0, time.monotonic()

    def token(self) -> None:
        self._tokens += 1

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._metrics = dict(metrics)
        if metrics["reverse_kl"] is not None:
            self._history.append(metrics["reverse_kl"])
        if metrics.get("score") is not None:
            self._scores.append(metrics["score"])
        self._write(self._line())
        now = time.monotonic()
        if not self._live and not self._quiet and (now - self._last_line > 5 or metrics["step"] in (1, self._steps)):
            self._last_line = now
            self._console.print(self._line(), highlight=False, markup=False, soft_wrap=True)

    def _left(self) -> float:
        done = self._metrics.get("step", 0)
        here = done - self._done
        return (time.monotonic() - self._started) / here * (self._steps - done) if here > 0 else float("nan")

    def _line(self) -> str:
        metrics = self._metrics
        domains = "  ".join(f"{name} {_number(value)}" for name, value in metrics.items() if name.startswith("kl/"))
        kl = "" if metrics["reverse_kl"] is None else f"kl {_number(metrics['reverse_kl'])}  {domains}  "
        score = "" if metrics.get("score") is None else f"score {metrics['score']:.1%}  "
        return (
            f"{self._stage} {metrics['step']}/{self._steps}  loss {_number(metrics['loss'])}  {kl}{score}"
            f"length {metrics['response_length']:.1f}  truncated {metrics['truncated']:.0%}  {_speed(metrics)}  left {_clock(self._left())}"
        )

    def _render(self) -> Panel:
        metrics = self._metrics
        done = metrics.get("step", 0)
        head = Table.grid(padding=(0, 2))
        head.add_row(
            f"step {done}/{self._steps}",
            ProgressBar(total=max(self._steps, 1), completed=done, width=40),
            f"left {_clock(self._left())}",
        )
        working = f"{self._phase or 'loading'} {time.monotonic() - self._phase_started:.0f} s" + (
            f", {self._tokens} tokens" if self._tokens else ""
        )
        rows: list[RenderableType] = [head, Text(working, style="dim")]
        if metrics:
            table = Table.grid(padding=(0, 2))
            table.add_row(
                "loss",
                _number(metrics["loss"]),
                "response",
                f"{metrics['response_length']:.1f} tokens, {metrics['truncated']:.0%} truncated",
            )
            if metrics["reverse_kl"] is not None:
                table.add_row("reverse KL", _number(metrics["reverse_kl"]), "", sparkline(self._history))
            if metrics.get("score") is not None:
                table.add_row("score", f"{metrics['score']:.1%}", "", sparkline(self._scores))
            for name, value in metrics.items():
                if name.startswith("kl/") and value is not None:
                    table.add_row(f"  {name.removeprefix('kl/')}", _number(value), "", "")
            rows += [table, Text(_speed(metrics), style="dim")]
        return Panel(
            Group(*rows),
            title=f"opd · {self._stage or 'starting'}",
            title_align="left",
            border_style="cyan",
            width=min(self._console.width, 100),
        )


def sparkline(values: list[float], width: int = 40) -> str:
    """The curve so far, in one line of text.

    >>> sparkline([3.0, 2.0, 1.0])
    '█▅▁'
    """
    if not values:
        return ""
    step = max(1, -(-len(values) // width))
    means = [
        sum(values[start : start + step]) / len(values[start : start + step]) for start in range(0, len(values), step)
    ]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in means)


def _speed(metrics: Mapping[str, Any]) -> str:
    tokens = metrics["tokens"]
    parts = [
        f"{phase} {tokens / metrics[f'time/{phase}']:,.0f}"
        for phase in ("sample", "score", "update")
        if metrics.get(f"time/{phase}", 0) > 1e-3  # else nobody was asked
    ]
    return "tokens/s: " + ", ".join(parts)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _clock(seconds: float) -> str:
    if math.isnan(seconds):
        return "–"
    return f"{int(seconds) // 3600:d}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"
