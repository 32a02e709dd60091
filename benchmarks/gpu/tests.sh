#!/usr/bin/env bash
# Tests of what runs on the card; about 100 s, 220 at most. JOBS processes share it, and what failed beside others is tried once more alone.
. "$(dirname "$0")/common.sh"
marked=(tests/test_{run_gpu,paging,graphed,engine_gpu,draw_kernels,select_kernels,decode_layers,decode_kernel,fused_layers,adapted_linear}.py
  tests/test_{attention_gpu,divergence_supports,sizes,vllm_sampler}.py)
try 120 gpu "$PYTHON" -m pytest -n "${JOBS:-4}" --dist worksteal -rfE --durations 10 -m gpu "${marked[@]}" ||
  try 50 gpu-again "$PYTHON" -m pytest -rfE --last-failed --last-failed-no-failures none -m gpu "${marked[@]}"
try 50 kernels "$PYTHON" -m pytest -n "${JOBS:-4}" --dist worksteal -rfE tests/test_divergence_triton.py tests/test_recorded.py
