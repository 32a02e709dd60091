"""Errors a user can see. Each says what was wrong, the value given, and what to do.

    OpdError                      exit code 1: the run could not continue
    ├── UserError (ValueError)    exit code 2: a mistake in the user's input
    │   ├── RecipeError           a key, type or value in a recipe
    │   ├── ModelError            a model that is missing, not a causal LM, or not usable here
    │   ├── TokenizerMismatch     student and teacher do not share one tokenizer
    │   ├── DataError             prompts that are missing, empty, malformed or too long
    │   │   └── UnopenedEpisode   a prompt whose first messages its environment did not give
    │   ├── RemoteError           a server that answers with an error: names the server and the request
    │   │   └── ServerAway        a server that did not answer within the patience
    │   └── RunDirectoryError     a run directory that is missing, damaged or unreadable: names the place
    │       └── RunLocked         another live process writes there: names it
    ├── TrainingError             non-finite loss, out of memory: names the place and the setting to change
    ├── RanksLost                 another rank ended without an error message
    ├── DiskError                 the disk is full or failed: names the file; `opd resume` continues once there is space
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


class UnopenedEpisode(DataError):
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
    """Another rank of the run ended without an error message."""


class AnotherRank(OpdError):
    """Another rank has already reported the error that ends all ranks."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.exit_code = code


class Stopped(Exception):
    """Raised inside a run when the user asked it to stop; caught by `runner.pipeline`."""


RESUME_ME = 75  # exit code of a preempted run; EX_TEMPFAIL of sysexits.h: try again later


class Preempted(Stopped):
    """SIGTERM: the machine is needed for something else. The run can resume from its durable state."""
