"""`opd report`, `opd view` and `opd plot`: parse and delegate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from opd.text import plain, printable

RunsGiven = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories; several are compared.")]


def add_commands(app: typer.Typer) -> None:
    app.command("report")(_report)
    app.command("view")(_view)
    app.command("plot")(_plot)


def _report(
    runs: RunsGiven,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file; default: report.html in the run directory.")
    ] = None,
) -> None:
    """Write a run, or several side by side, as one HTML file that needs nothing else."""
    from opd.report.page import write_report

    print(plain(f"wrote {write_report(runs, out)}"))


def _view(
    run: Annotated[Path, typer.Argument(help="A run directory, of a run at work or ended.")],
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0: any that is free.")] = 0,
) -> None:
    """Serve the report live to this machine, with every rollout of the store."""
    from opd.report.view import serve_view

    serve_view(run, port, lambda line: print(printable(line), file=sys.stderr, flush=True))


def _plot(
    runs: RunsGiven,
    metric: Annotated[
        list[str], typer.Option(help="As in metrics.jsonl, * for any part of a name; repeat for more panels.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="A .svg, .pdf or .png file.")],
    smooth: Annotated[int, typer.Option(min=1, help="Mean over so many steps.")] = 1,
    width: Annotated[float, typer.Option(min=1.0, max=40.0, help="Inches.")] = 5.5,
) -> None:
    """Draw curves of one run or several, for papers."""
    from opd.report.plot import plot_runs

    print(plain(f"wrote {plot_runs(runs, metric, out, smooth=smooth, width=width)}"))
