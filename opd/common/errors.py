"""Errors a user can see. Each says what was wrong, the value given, and what to do.

    OpdError                      exit code 1: the run could not go on
    ├── UserError (ValueError)    exit code 2: a mistake in what was asked for
    │   ├── RecipeError           a key, type or value in a recipe
    │   ├── ModelError            a model that is missing, not a causal LM, or not usable here
    │   ├── TokenizerMismatch     student and teacher do not share one tokenizer
    │   ├── DataError             prompts that are missing, empty, malformed or too long
    │   ├── RemoteError           a server that answers with an error: names it and what was asked
    │   │   └── ServerAway        one that does not answer, for longer than the patience
    │   └── RunDirectoryError     a run directory that is missing, damaged or unreadable: names the place
    │       └── RunLocked         another live process writes there: names it
    ├── TrainingError             non-finite loss, out of memory: names the place and the knob
    ├── RanksLost                 of several ranks, another has ended without a word
    ├── DiskError                 the disk is full or failed: names the file; `opd resume` goes on once there is room
    └── StoreError                the rollout log is damaged: names the file and the offset

`Stopped` is not an error: Ctrl-C asked the run to end, and it ended cleanly. `Preempted` says that SIGTERM did: resume it.
"""

from __future__ import annotations


class OpdError(Exception):
    exit_code = 1


class UserError(OpdError, ValueError):
    exit_code = 2


class RecipeError(UserError):
    pass


class ModelError(UserError):
    pass


class TokenizerMismatch(UserError):
    pass


class DataError(UserError):
    pass


class RemoteError(UserError):
    pass


class ServerAway(RemoteError):
    pass


class RunDirectoryError(UserError):
    pass


class RunLocked(RunDirectoryError):
    pass


class TrainingError(OpdError):
    pass


class DiskError(OpdError):
    pass


class StoreError(OpdError):
    pass


class RanksLost(OpdError):
    """Another rank of the run has ended, and took no leave."""


class AnotherRank(OpdError):
    """Another rank has told of the error that ends them all: nothing is left to say."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.exit_code = code


class Stopped(Exception):
    """Raised inside a run when the user asked it to stop; caught by `runner.pipeline`."""


RESUME_ME = 75  # exit code of a preempted run; EX_TEMPFAIL of sysexits.h: try again later


class Preempted(Stopped):
    """SIGTERM: the machine is wanted back. What is durable is enough to go on from."""
