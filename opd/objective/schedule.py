"""A coefficient that changes with the step."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, model_validator

from opd.settings import SETTINGS, Positive

Moment = Positive | Literal["plateau"]


class Schedule(BaseModel):
    """A coefficient that changes with the step. A plain number is one that does not."""

    model_config = SETTINGS
    value: float = 1.0
    to: float | None = Field(None, description="where a straight line from `value` ends …")
    over: Positive | None = Field(None, description="… after this many steps; it stays there")
    until: Moment | None = Field(None, description="0 after this step, or once evaluation stops improving")
    after: Moment | None = Field(
        None, description="0 up to and including this step, or until evaluation stops improving"
    )

    @model_validator(mode="after")
    def _line(self) -> Schedule:
        if (self.to is None) != (self.over is None):
            raise ValueError("`to` and `over` belong together: {value: 5e-3, to: 1e-3, over: 100}")
        if isinstance(self.until, int) and isinstance(self.after, int) and self.until <= self.after:
            raise ValueError(f"`after` ({self.after}) must be less than `until` ({self.until})")
        return self

    def __str__(self) -> str:
        """The number, and that it changes."""
        moving = (self.to, self.until, self.after) != (None, None, None)
        return f"{self.value:g}{'…' if moving else ''}"

    @property
    def never(self) -> bool:
        """Whether it is 0 at every step."""
        return self.value == 0 and not self.to

    def at(self, step: int, plateau: int | None) -> float:
        """The coefficient of a step, counted from 1. `plateau`: the step after which evaluation stopped improving."""
        first = 0
        if self.until is not None:
            end = plateau if self.until == "plateau" else self.until
            if end is not None and step > end:
                return 0.0
        if self.after is not None:
            start = plateau if self.after == "plateau" else self.after
            if start is None or step <= start:
                return 0.0
            first = start
        if self.to is None or self.over is None:
            return self.value
        return self.value + (self.to - self.value) * min((step - first - 1) / max(self.over - 1, 1), 1.0)
