"""The rollout store: the only path from the sampler to the trainer, and everything of a run that must not be lost.

    files        what is asked of a disk               frames   segments, checksums, torn tail or damage
    log          append a commit, follow the chain     records  what a commit holds
    commit       group commit, the thread that syncs   index    one light row per rollout
    state        index and unfinished, by replay       entries  the index, one rollout at a time
    rollouts     `RolloutStore`, what is written       reading  what is read, and the state at opening
    select       `store.where(…)`, Parquet             calls    calls about finished rollouts, found again
    environment  replay of tool and sandbox calls      salvage  what can be read of a damaged log
    repair       `opd store check|repair`              recover  finish a repair that was cut short
    reclaim      segments that are given back
    samplers     logs of samplers: their writer        linking  one store over them

Tokens are appended as they are sampled; a rollout counts, i.e. can be read, only once its finish record is durable. See
docs/durability.md for the guarantee and the format.
"""

from opd.store.index import Selection, iterate
from opd.store.log import Position
from opd.store.reading import REPAIRED
from opd.store.rollouts import Replay, RolloutStore
from opd.store.state import Entry

__all__ = ["REPAIRED", "Entry", "Position", "Replay", "RolloutStore", "Selection", "iterate"]
