#!/usr/bin/env bash
# What has to be the same bit for bit, on this machine's processor; about 100 s on eight cores, 150 at most. Can run beside tests.sh.
. "$(dirname "$0")/common.sh"
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
try 150 bits "$PYTHON" -m pytest -n "${JOBS:-8}" --dist worksteal -p no:cacheprovider -rfE --durations 10 \
  -m "not gpu and not smol and not crash and not safety and not families and not scale" \
  tests/engines/test_{builtin,sampler_processes}.py tests/store/test_sampler_logs.py tests/models/test_{attention,lora}.py \
  tests/loop/test_{semantics,precision,rescue}.py tests/teachers/test_{student_copies,cached,paging,topk_signals}.py \
  tests/runner/test_{checkpoint,resume}.py
