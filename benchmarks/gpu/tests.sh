#!/usr/bin/env bash
# Tests of what runs on the card; about 100 s, 220 at most. JOBS processes share it, and what failed beside others is tried once more alone.
. "$(dirname "$0")/common.sh"
marked=(tests/divergences/test_{supports,largest_columns}.py tests/models/test_{adapted_linear,attention_gpu,cuda_graphs,fused_layers}.py
  tests/engines/test_{builtin_gpu,decode_attention,draw_kernels,gpu_layers,vllm}.py tests/teachers/test_paging.py tests/loop/test_sizes.py
  tests/runner/test_runs_gpu.py)
try 120 gpu "$PYTHON" -m pytest -n "${JOBS:-4}" --dist worksteal -rfE --durations 10 -m gpu "${marked[@]}" ||
  try 50 gpu-again "$PYTHON" -m pytest -rfE --last-failed --last-failed-no-failures none -m gpu "${marked[@]}"
try 50 kernels "$PYTHON" -m pytest -n "${JOBS:-4}" --dist worksteal -rfE tests/divergences/test_triton.py tests/engines/test_unrecorded_calls.py
