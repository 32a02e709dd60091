"""Plays one episode of verifiers: `python -P verifiers_program.py SETTINGS`, in a Python that has verifiers. It imports nothing of opd.

The prompt's number chooses the task. The endpoint of the student is in `OPENAI_BASE_URL`. The last line that it prints is the reward.
"""

import asyncio
import itertools
import json
import os
import re
import sys
from typing import Any


def task_number(prompt_id: str) -> int:
    """
    >>> task_number("episodes:sums/train/7")
    7
    """
    found = re.findall(r"\d+", prompt_id)
    return int(found[-1]) if found else 0


async def played(settings: dict[str, Any], facts: dict[str, Any]) -> float:
    """The reward of an episode: the sum over its agents."""
    import verifiers.v1 as vf

    environment = vf.load_environment(vf.resolve_env_config(settings))
    number, taskset = task_number(facts["id"]), environment.taskset
    if taskset.bounded:
        tasks = list(taskset)
        task = tasks[number % len(tasks)]
    else:
        task = next(itertools.islice(taskset, number, None))
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        episode = await environment.run_episode(task, vf.ModelContext(model="student", client=client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        sys.exit(f"verifiers: {errors[0].message if errors else 'the episode has failed'}")
    return float(sum(trace.reward for trace in episode.traces))


if __name__ == "__main__":
    print(json.dumps({"reward": asyncio.run(played(json.loads(sys.argv[1]), json.loads(sys.stdin.readline())))}))
