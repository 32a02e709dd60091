"""The rollout store: the only path from the sampler to the trainer, and the durable data of a run.

    log       files, segments, frames, records, group commit
    rollouts  `RolloutStore`: the index and its queries, reading, writing, recovery, sampler logs, replay of environment calls
    repair    `opd store check|repair`

Tokens are appended as they are sampled. A rollout counts (can be read) only once its finish record is durable. See
docs/durability.md for the guarantee and the format.
"""

from opd.store.log import Position
from opd.store.rollouts import REPAIRED, Entry, Replay, RolloutStore, Selection, iterate

__all__ = ["REPAIRED", "Entry", "Position", "Replay", "RolloutStore", "Selection", "iterate"]
