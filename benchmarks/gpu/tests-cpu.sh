#!/usr/bin/env bash
# What has to be the same bit for bit, on this machine's processor; about 100 s on eight cores, 150 at most. Can run beside tests.sh.
. "$(dirname "$0")/common.sh"
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
try 150 bits "$PYTHON" -m pytest -n "${JOBS:-8}" --dist worksteal -p no:cacheprovider -rfE --durations 10 \
  -m "not gpu and not smol and not crash and not safety and not families and not scale" \
  tests/test_{engine,sampler_processes,store_samplers,semantics,precision,attention,lora,rescue,following,cached,checkpoint,resume,paging,topk_signals}.py
