"""Every benchmark runs at its smallest size, so that none falls behind the code it measures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import opd

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow
SMALLEST = {
    "beyond_teacher": "--steps 1 --seeds 1 --weights 0 1 --prompts 8 --workers 1",
    "opd_vs_rl": "--steps 1 --seeds 1 --rates 1e-4 --prompts 8 --workers 1 --methods GRPO sum",
    "integrate": "--directory {run} --smallest --arms opd-exact sft-gold merge-average --steps 1 --rollouts 8 --prompts 4 --seeds 0 --workers 0",
    "headline": "--directory {run} --steps 1 --rl-steps 1 --rollouts 8 --rates 1e-3 --rl-rates 1e-4 --groups 4 --other-sizes 1 --points 1 --prompts 4 --train-rows 50 --seeds 1 --workers 0",
    "disputes": "--directory {run} --steps 2 --rollouts 8 --prompts 4 --rates 1e-3 --seeds 1 --workers 0 --arms sum hard-switch",
    "defects": "--directory {run} --steps 1 --rollouts 8 --prompts 4 --rates 1e-3 --teacher-steps 1 --seeds 1 --workers 0",
    "horizon": "--directory {run} --steps 1 --rollouts 8 --prompts 4 --rates 1e-3 --teacher-steps 1 --lengths 4 8 --methods on-policy off-policy --tokens 32 --seeds 1 --workers 0",
    "added_teachers": "--directory {run} --steps 1 --rollouts 8 --prompts 4 --rates 1e-3 --seeds 1 --workers 0",
    "gradient_variance": "--teachers 1 5 --rollouts 10 --batches 2",
    "recovery": "--directory {run} --steps 1 --rollouts 8 --prompts 4 --rates 1e-3 1e-3 --seeds 1 --workers 0",
    "labs": "--directory {run} --workers 1 --labs labs/qwen3 --set train.steps=1 stages.off-policy.train.steps=1 rollout.prompts=8 eval.prompts=2 eval.k=0",
