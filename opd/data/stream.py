"""Which prompts a step gets.

Shares are exact, every prompt of a finite source is seen once per pass, and a few integers are enough to resume.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from opd.common.errors import DataError
from opd.data.shares import DomainSeen, ShareKeeper, Shares
from opd.data.sources import Source
from opd.records import Rollout, Visit

PATIENCE = 10_000  # prompts of an endless source that may be rejected in a row


class PromptStream:
    """Draws from several sources by share. Finite sources are reshuffled each pass, by (seed, source, pass).

    An unusable row takes its turn like any other and is then skipped, so it does not change the prompts after it.

    >>> stream = PromptStream(sources, shares=[3, 1], seed=0)   # doctest: +SKIP
    >>> [visit.source for visit in stream.take(4)]              # doctest: +SKIP
    [0, 0, 1, 0]
    """

    def __init__(self, sources: list[Source], shares: list[float], seed: int) -> None:
        self._sources, self._seed = sources, seed
        self._shares = np.asarray(shares, dtype=np.float64) / sum(shares)
        self._taken = np.zeros(len(sources), dtype=np.int64)
        self._owed = np.zeros(len(sources))  # prompts owed to each source when shares last changed
        self._before = np.zeros(len(sources), dtype=np.int64)  # prompts taken by then
        self._orders: dict[int, tuple[int, np.ndarray]] = {}
        self._unusable: Sequence[np.ndarray | None] = [None] * len(sources)
        self._fits: Callable[[Visit], bool] | None = None
        self.skipped = 0  # visits to unusable prompts
        self.keeper: ShareKeeper | None = None
        self._domains: list[str] = []  # of the sources, if shares follow a rule
        self._parts = np.ones(len(sources))  # each source's fraction of its domain's share

    def leave_out(self, unusable: Sequence[np.ndarray | None], fits: Callable[[Visit], bool] | None) -> None:
        """Set the rows of each finite source to skip, and a check for prompts that could not all be scanned."""
        self._unusable, self._fits = unusable, fits

    def steer(self, rule: Shares) -> None:
        """Let shares follow a rule. Every source must then have a single domain."""
        if not rule.steers:
            return
        found = [sorted({prompt.domain for prompt in source.examples()}) for source in self._sources]
        for source, domains in zip(self._sources, found, strict=True):
            if len(domains) > 1:
                raise DataError(
                    f"prompts {source.name}: rows of the domains {', '.join(domains[:5])}, and shares {rule.name} divides prompts "
                    "among sources. Give every domain a source of its own, or set shares: static."
                )
        self._domains = [domain for domain, *_ in found]
        static: dict[str, float] = {}
        for domain, share in zip(self._domains, self._shares.tolist(), strict=True):
            static[domain] = static.get(domain, 0.0) + share
        if len(static) < 2:
            raise DataError(
                f"shares {rule.name} divides prompts among domains, and there is one: {self._domains[0]}. Drop it."
            )
        self._parts = self._shares / [static[domain] for domain in self._domains]
        self.keeper = ShareKeeper(rule, static)

    def reshare(self, shares: Mapping[str, float]) -> None:
        """Set the shares of domains from now on. Debts to sources from the old shares are kept."""
        owed = self._credit(0)
        self._owed, self._before = owed, self._taken.copy()
        self._shares = np.asarray([shares[domain] for domain in self._domains]) * self._parts

    def divide(
        self, gaps: Mapping[str, float], share: Callable[[Callable[[], dict[str, float]]], dict[str, float]]
    ) -> None:
        """Before a step: update the domains' shares, if a rule is set. `gaps`: how far each domain scores below its teacher.

        `share`: broadcasts the first rank's result to all ranks.
        """
        if (keeper := self.keeper) is not None:
            self.reshare(share(lambda: dict(keeper.shares(gaps))))

    def note(self, rollouts: Sequence[Rollout], metrics: Mapping[str, float | None]) -> dict[str, float]:
        """After a step: record the domains' statistics. Returns the shares of that step."""
        if self.keeper is None:
            return {}
        sizes: dict[str, list[int]] = {}
        for rollout in rollouts:
            sizes.setdefault(rollout.domain, []).append(int(rollout.response_ids.size))
        self.keeper.observe(
            {name: DomainSeen(len(size), sum(size), metrics.get(f"kl/{name}")) for name, size in sizes.items()}
        )
        return {f"share/{domain}": share for domain, share in self.shares.items()}

    def _credit(self, more: int) -> np.ndarray:
        """Prompts owed to each source after `more` further draws."""
        taken = self._taken - self._before
        credit: np.ndarray = self._owed + (self._shares * (taken.sum() + more) - taken)
        return credit

    @property
    def shares(self) -> dict[str, float]:
        """Current shares of the domains; empty if they are fixed."""
        found: dict[str, float] = {}
        for domain, share in zip(self._domains, self._shares.tolist(), strict=True) if self._domains else ():
            found[domain] = found.get(domain, 0.0) + share
        return found

    def take(self, count: int) -> list[Visit]:
        return [self._usable() for _ in range(count)]

    def _usable(self) -> Visit:
        skipped = 0
        while (visit := self._next()) is None:
            self.skipped, skipped = self.skipped + 1, skipped + 1
            if skipped > PATIENCE + sum(source.size or 0 for source in self._sources):
                raise DataError(
                    "prompts: thousands in a row cannot be used. Raise rollout.max_prompt_tokens, or lower "
                    "rollout.max_new_tokens."
                )
        return visit

    def _next(self) -> Visit | None:
        """The next visit by share and order; None if the prompt is unusable."""
        source = int(np.argmax(self._credit(1)))
        position = int(self._taken[source])
        self._taken[source] += 1
        size, unusable = self._sources[source].size, self._unusable[source]
        if size is None:
            visit, index = 0, position
        else:
            visit, offset = divmod(position, size)
            index = int(self._order(source, visit, size)[offset])
        if unusable is not None and unusable[index]:
            return None
        found = Visit(self._sources[source].train(index), visit, source)
        return found if self._fits is None or self._fits(found) else None

    def _order(self, source: int, visit: int, size: int) -> np.ndarray:
        cached = self._orders.get(source)
        if cached is None or cached[0] != visit:
            cached = (visit, np.random.default_rng([self._seed, source, visit]).permutation(size))
            self._orders[source] = cached
        return cached[1]

    def state(self) -> dict[str, Any]:
        state = {"taken": self._taken.tolist(), "skipped": self.skipped}
        if self.keeper is not None:
            state |= {"shares": self._shares.tolist(), "owed": self._owed.tolist(), "before": self._before.tolist()}
            state["needs"] = self.keeper.state()
        return state

    def restore(self, state: dict[str, Any]) -> None:
        self._taken = np.asarray(state["taken"], dtype=np.int64)
        self.skipped = state.get("skipped", 0)  # runs of versions that could not skip rows
        if self.keeper is not None:
            self._shares, self._owed = np.asarray(state["shares"]), np.asarray(state["owed"])
            self._before = np.asarray(state["before"], dtype=np.int64)
            self.keeper.restore(state["needs"])
