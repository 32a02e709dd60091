"""`opd plot`: curves of one run or several as a figure for a paper. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from opd.common.errors import UserError
from opd.common.text import plain
from opd.monitors.monitor import ESTIMATES
from opd.registry import nearest
from opd.report.facts import run_facts

FORMATS = (".svg", ".pdf", ".png")
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
)  # Okabe and Ito: safe for colour-blind readers
LINES = ("-", "--", ":", "-.")
NAMES = {"reverse_kl": "KL(student ‖ teacher), nats per token", "response_length": "tokens per answer", "at": "step"}


def plot_runs(runs: Sequence[Path], metrics: Sequence[str], to: Path, *, smooth: int = 1, width: float = 5.5) -> Path:
    """One panel per metric or pattern, one line per run and name."""
    if to.suffix.lower() not in FORMATS:
        raise UserError(f"{str(to)!r}: a figure is written as {', '.join(FORMATS)}.")
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        raise UserError("opd plot needs matplotlib: pip install 'opd[plot]'") from None
    found = {_label(path, runs): run_facts(path, whole=True)["metrics"] for path in runs}
    panels = [_lines(found, pattern) for pattern in metrics]
    mpl.use("Agg")
    from matplotlib import pyplot

    settings = {
        "svg.hashsalt": "opd",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "pdf.fonttype": 42,
    }
    with mpl.rc_context(settings):
        figure, axes = pyplot.subplots(len(panels), 1, figsize=(width, 2.4 * len(panels)), squeeze=False, sharex=True)
        for (axis,), pattern, lines in zip(axes, metrics, panels, strict=True):
            for number, (label, steps, values) in enumerate(lines):
                style = {
                    "color": COLOURS[number % len(COLOURS)],
                    "linestyle": LINES[number // len(COLOURS) % len(LINES)],
                }
                axis.plot(steps, smoothed(steps, values, smooth), label=_shown(label), linewidth=1.3, **style)
            axis.set_ylabel(_shown(NAMES.get(pattern, pattern)))
            axis.grid(alpha=0.25, linewidth=0.6)
            if len(lines) > 1:
                axis.legend(frameon=False, fontsize=8)
        axes[-1][0].set_xlabel("step")
        try:
            stamp = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(to.suffix.lower(), {})
            figure.savefig(to, bbox_inches="tight", dpi=200, metadata=stamp)
        except OSError as error:
            raise UserError(f"{str(to)!r} cannot be written: {error.strerror or error}.") from None
        finally:
            pyplot.close(figure)
    return to


def _label(path: Path, runs: Sequence[Path]) -> str:
    names = [Path(run).absolute().name for run in runs]
    name = Path(path).absolute().name
    return name if names.count(name) == 1 else str(path)


def _lines(runs: Mapping[str, Mapping[str, list[Any]]], pattern: str) -> list[tuple[str, list[int], list[float]]]:
    lines = []
    for run, own in runs.items():
        metrics = {**own, pattern: _or_estimate(own, pattern)} if pattern in ESTIMATES else own
        names = [name for name in metrics if name not in ("at", "step", "stage") and fnmatchcase(name, pattern)]
        for name in names:
            points = [(at, value) for at, value in zip(metrics["at"], metrics[name], strict=True) if value is not None]
            several = [part for part in (run if len(runs) > 1 else "", name if len(names) > 1 else "") if part]
            if points:
                lines.append((" · ".join(several) or name, [at for at, _ in points], [value for _, value in points]))
    if not lines:
        known = sorted({name for metrics in runs.values() for name in metrics} - {"at", "step", "stage"})
        raise UserError(f"--metric {pattern!r}: no step of these runs has this metric; {nearest(pattern, known)}")
    return lines


def _or_estimate(metrics: Mapping[str, list[Any]], name: str) -> list[Any]:
    """A metric by step, or the estimate that replaces it."""
    nothing = [None] * len(metrics["at"])
    pairs = zip(metrics.get(name, nothing), metrics.get(ESTIMATES[name], nothing), strict=True)
    return [estimate if value is None else value for value, estimate in pairs]


def smoothed(steps: Sequence[int], values: Sequence[float], count: int) -> list[float]:
    """Mean of the values of each step and the `count` - 1 steps before it, however many of them have a value.

    >>> smoothed([1, 2, 3], [1, 3, 5], 2)
    [1.0, 2.0, 4.0]
    >>> smoothed([10, 20, 30], [1, 3, 5], 11)
    [1.0, 2.0, 4.0]
    """
    means, first = [], 0
    for last, step in enumerate(steps):
        while steps[first] <= step - count:
            first += 1
        part = values[first : last + 1]
        means.append(sum(part) / len(part))
    return means


def _shown(text: str) -> str:
    return plain(text, 80).replace("$", r"\$")
