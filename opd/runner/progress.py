"""The display of a run: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import math
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from opd.common.files import append_text
from opd.common.text import cell, plain

SPARKS = "▁▂▃▄▅▆▇█"
ROWS = 12  # domains shown at once
RECENT = 20  # steps, evaluations and saves used to estimate the remaining time


class Progress:
    """Use as a context manager and pass metrics to it. `quiet` prints nothing (Python API, tests). `log` receives every line, if given.

    The panel is hidden while models are loaded, because downloads draw their own bars.
    """

    def __init__(self, console: Console, log: Path | None, quiet: bool = False) -> None:
        self._console, self._log, self._quiet = console, log, quiet
        self._stage, self._steps = "", 0
        self.current_phase = ""
        self._tokens, self._last_line = 0, 0.0
        self._metrics: dict[str, Any] = {}
        self._history: list[float] = []
        self._rewards: list[float] = []
        self._evaluated: tuple[int, dict[str, float]] = (0, {})  # step, and pass@1 by domain
        self._estimate = Estimate(0, {})
        self._phase_started = time.monotonic()
        self._live = (
            Live(console=console, refresh_per_second=4, transient=True, get_renderable=self._render)
            if console.is_terminal and not quiet
            else None
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, line: str) -> None:
        line = plain(line)
        self._write(line)
        self._print(line)

    def show(self, table: Table) -> None:
        """Show a table on the screen, and write it as plain text to the log."""
        page = Console(file=io.StringIO(), width=200, color_system=None, force_terminal=False)
        with page.capture() as captured:
            page.print(table)
        for line in captured.get().splitlines():
            self._write(line.rstrip())
        if not self._quiet:
            self._console.print(table)

    def start_stage(self, name: str, steps: int, done: int = 0, every: Mapping[str, int] | None = None) -> None:
        """`every`: other work of the stage, and after how many steps it is due (0: only at the end)."""
        self._stage, self._steps, self._metrics = name, steps, {"step": done} if done else {}
        self._history, self._rewards, self._evaluated = [], [], (0, {})
        self._estimate = Estimate(steps, every or {})

    def phase(self, name: str) -> None:
        now = time.monotonic()
        self._estimate.others.setdefault(self.current_phase, []).append(now - self._phase_started)
        self.current_phase, self._tokens, self._phase_started = name, 0, now
        if self._live and name == "loading":
            self._live.stop()
        elif self._live:
            self._live.start()

    def token(self, token: object = None) -> None:
        self._tokens += 1

    def evaluated(self, step: int, scores: Mapping[str, float | None]) -> None:
        """pass@1 on held-out prompts, by domain; None if no answer could be rewarded."""
        self._evaluated = step, {name: value for name, value in scores.items() if value is not None}

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._metrics = dict(metrics)
        if metrics["reverse_kl"] is not None:
            self._history.append(metrics["reverse_kl"])
        if metrics.get("reward") is not None:
            self._rewards.append(metrics["reward"])
        scores = _by_domain(metrics, "eval/")
        if scores:
            self.evaluated(metrics["step"], scores)
        self._estimate.step(metrics)
        line = plain(self._line(scores))
        self._write(line)
        now = time.monotonic()
        if not self._live and (now - self._last_line > 5 or metrics["step"] in (1, self._steps)):
            self._last_line = now
            self._print(line)

    def _write(self, line: str) -> None:
        if self._log is None:
            return
        append_text(self._log, f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")

    def _print(self, line: str) -> None:
        if not self._quiet:
            self._console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def _line(self, scores: Mapping[str, float]) -> str:
        metrics = self._metrics
        parts = [f"{self._stage} {metrics['step']}/{self._steps}", f"loss {_number(metrics['loss'])}"]
        if metrics["reverse_kl"] is not None:
            domains = _listed(_by_domain(metrics, "kl/"), _number)
            parts.append(f"KL to teacher {_number(metrics['reverse_kl'])} nats" + (f" ({domains})" if domains else ""))
        if metrics.get("reward") is not None:
            parts.append(f"mean reward {metrics['reward']:.3g}")
        if scores:
            parts.append(f"held-out pass@1 ({_listed(scores, '{:.1%}'.format)})")
        parts.append(f"length {metrics['response_length']:.1f}")
        parts.append(f"truncated {metrics['truncated']:.0%}")
        return "  ".join([*parts, _speed(metrics), f"left {_clock(self._estimate.left())}"])

    def _render(self) -> Panel:
        metrics = self._metrics
        done = metrics.get("step", 0)
        head = Table.grid(padding=(0, 2))
        head.add_row(
            f"step {done}/{self._steps}",
            ProgressBar(total=max(self._steps, 1), completed=done, width=40),
            f"left {_clock(self._estimate.left())}",
        )
        working = f"{self.current_phase} {time.monotonic() - self._phase_started:.0f} s" + (
            f", {self._tokens} tokens" if self._tokens else ""
        )
        rows: list[RenderableType] = [head, cell(working, style="dim")]
        if "loss" in metrics:
            rows += [self._numbers(), Text(_speed(metrics), style="dim")]
        domains = self._domains()
        if domains.rows:
            rows.insert(-1 if "loss" in metrics else len(rows), domains)
        return Panel(
            Group(*rows),
            title=Text.assemble("opd · ", cell(self._stage or "starting")),
            title_align="left",
            border_style="cyan",
            width=min(self._console.width, 100),
        )

    def _numbers(self) -> Table:
        """The newest step's numbers over all domains."""
        metrics, table = self._metrics, Table.grid(padding=(0, 2))
        response = f"{metrics['response_length']:.1f} tokens, {metrics['truncated']:.0%} truncated"
        table.add_row("loss", _number(metrics["loss"]), f"responses: {response}")
        if metrics["reverse_kl"] is not None:
            table.add_row("KL to teacher, nats", _number(metrics["reverse_kl"]), sparkline(self._history))
        if metrics.get("reward") is not None:
            table.add_row("mean reward", f"{metrics['reward']:.3g}", sparkline(self._rewards))
        return table

    def _domains(self) -> Table:
        """One row per domain. A divergence falls towards 0 while a score rises, so each column is labelled."""
        (step, scores), divergences = self._evaluated, _by_domain(self._metrics, "kl/")
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        table.add_column("domain")
        if divergences:
            table.add_column("KL to teacher, nats", justify="right")
        if scores:
            table.add_column(f"pass@1, held out, {f'step {step}' if step else 'before'}", justify="right")
        names = list(dict.fromkeys([*divergences, *scores]))
        for name in names[:ROWS]:
            row = [_number(divergences.get(name))] if divergences else []
            row += [f"{scores[name]:.1%}" if name in scores else "–"] if scores else []
            table.add_row(cell(name), *row)
        if len(names) > ROWS:
            table.add_row(f"and {len(names) - ROWS} more")
        return table


class Estimate:
    """The remaining time of a stage. Steps are counted separately from evaluations and saves, which are rarer.

    The first step of a process compiles, allocates and warms up, so it is not counted.
    """

    def __init__(self, steps: int, every: Mapping[str, int]) -> None:
        self._steps, self._every = steps, dict(every)
        self._seconds: list[float] = []  # seconds of each step of this process
        self.others: dict[str, list[float]] = {}  # seconds of each time that a phase was entered
        self._done, self._at = 0, time.monotonic()

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._seconds.append(sum(value for name, value in metrics.items() if name.startswith("time/")))
        self._done, self._at = metrics["step"], time.monotonic()

    def left(self) -> float:
        """Seconds; NaN until a second step has finished."""
        if len(self._seconds) < 2:
            return math.nan
        total = statistics.median(self._seconds[1:][-RECENT:]) * (self._steps - self._done)
        for name, every in self._every.items():
            if not (seconds := self.others.get(name)):
                continue
            times = (self._steps - 1) // every - self._done // every if every else 0
            total += statistics.median(seconds[-RECENT:]) * (max(times, 0) + 1)  # one more at the end
        return max(total - (time.monotonic() - self._at), 0.0)


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
        if metrics.get(f"time/{phase}", 0) > 1e-3  # otherwise no teacher was asked
    ]
    return "tokens/s: " + ", ".join(parts)


def _by_domain(metrics: Mapping[str, Any], prefix: str) -> dict[str, float]:
    found = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
    return {name: value for name, value in found.items() if value is not None}


def _listed(values: Mapping[str, float], form: Callable[[float], str]) -> str:
    shown = [f"{plain(name, 40)} {form(value)}" for name, value in list(values.items())[:ROWS]]
    return ", ".join(shown + ([f"and {len(values) - ROWS} more"] if len(values) > ROWS else []))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _clock(seconds: float) -> str:
    if math.isnan(seconds):
        return "–"
    seconds = round(seconds)
    return f"{seconds // 3600:d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
