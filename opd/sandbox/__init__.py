"""A sandbox for code nobody has read: programs the model wrote, and libraries that may run what it wrote."""

from opd.sandbox.walls import MEGABYTE, START, Cell, Limits, Outcome, choose, kill, python, run_program, start, trouble

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
    "trouble",
]
