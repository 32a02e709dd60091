"""The rollout store: the only path from the sampler to the trainer, and the durable data of a run.

    log       disk operations, segments and frames, group commit
    records   the records in a commit
    index     one row per rollout; `store.where(…)`, Parquet
    state     the index and the unfinished rollouts, by replay; entries of the index
    reading   reading and recovery; sampler logs, deleted segments, interrupted repairs
    rollouts  `RolloutStore`: writing, linking sampler logs, replay of environment calls
    repair    `opd store check|repair`

Tokens are appended as they are sampled. A rollout counts (can be read) only once its finish record is durable. See
docs/durability.md for the guarantee and the format.
"""

from opd.store.index import Selection, iterate
from opd.store.log import Position
from opd.store.reading import REPAIRED
from opd.store.rollouts import Replay, RolloutStore
from opd.store.state import Entry

__all__ = ["REPAIRED", "Entry", "Position", "Replay", "RolloutStore", "Selection", "iterate"]
