"""A worker of the pool: `python -m opd.rewards.worker PARENT`. Reads samples, writes judgements, imports no torch.

For each sample two lines go back: that the scorer is loaded (the sample's time starts there), then the judgement. It ends
with its parent: on the end of its input, and by the kernel's hand if it happens to hang just then.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
import sys

from opd.rewards.scorers import SCORERS
from opd.rewards.travel import READY, read_request, reply
from opd.types import Judgement

MEMORY = 4 << 30
MODULES = {"maths": "math_verify", "json": "jsonschema", "gym": "reasoning_gym"}  # loading is not the sample's time


def main() -> None:
    parent = int(sys.argv[1])
    if sys.platform == "linux" and parent:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or hard > MEMORY:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answers = os.dup(1)  # what scorers print must not mix with what is answered
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)
    lines = os.fdopen(os.dup(0), "rb")
    os.dup2(nowhere, 0)
    os.write(answers, READY)
    os.dup2(nowhere, 2)
    for line in lines:
        name, spec, sample = read_request(line)
        try:
            if name in MODULES:
                __import__(MODULES[name])
            os.write(answers, READY)
            judgement = SCORERS[name](spec, sample)
            if judgement.score is not None and not math.isfinite(judgement.score):
                judgement = Judgement(None, error=f"the score is {judgement.score}")
        except Exception as error:  # the border to foreign code: whatever it raises, the sample could not be judged
            judgement = Judgement(None, error=f"{type(error).__name__}: {error}")
        os.write(answers, reply(judgement))


if __name__ == "__main__":
    main()
