"""A sandbox for untrusted code: programs that a model wrote, and libraries that may run them."""

from opd.sandbox.walls import (
    MEGABYTE,
    START,
    Cell,
    Limits,
    Outcome,
    choose,
    kill,
    python,
    run_program,
    start,
    why_unusable,
)

__all__ = [
    "MEGABYTE",
    "START",
    "Cell",
    "Limits",
    "Outcome",
    "choose",
    "kill",
    "python",
    "run_program",
    "start",
    "why_unusable",
]
