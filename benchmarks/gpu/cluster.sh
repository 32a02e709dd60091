#!/usr/bin/env bash
# One rank of FSDP2 beside the same step in one process, in one run; about 140 s, 180 at most.
. "$(dirname "$0")/common.sh"
rm -f "$OUT/ranks-cuda.json" # it would be added to
try 180 ranks "$PYTHON" -m torch.distributed.run --nproc-per-node 1 benchmarks/ranks_gpu.py \
  --models "$WORK/models" --both --steps 5 --warm 2 --stacks 60 --out "$OUT/ranks-cuda.json"
