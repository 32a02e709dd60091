"""How long things took here."""

from __future__ import annotations

import time


class Stopwatch:
    """Seconds and tokens of what a step consists of, as they went by here."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.tokens: dict[str, int] = {}
        self._since = time.monotonic()

    def begin(self) -> None:
        self._since = time.monotonic()

    def end(self, what: str, tokens: int) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - self._since
        self.tokens[what] = self.tokens.get(what, 0) + tokens

    def each(self, what: str) -> float:
        """Seconds of a token."""
        return self.seconds[what] / max(self.tokens[what], 1)
