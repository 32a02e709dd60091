#!/usr/bin/env bash
# Six teachers of 0.6B, two of them on the card, whose losses are those of all six there; then twelve of 4B beside one, for memory and time.
# About 300 s, 410 at most. Wants the card's memory for itself, 105 GB of host memory and 18 GB in WORK.
. "$(dirname "$0")/common.sh"
try 130 pool-small "$PYTHON" benchmarks/teacher_pool.py --device cuda --teacher 0.6B --teachers 6 --prompts 192 --new-tokens 64 --steps 2 --arms all two \
  --unsaved --name teacher-pool-small-cuda.json --directory "$WORK/pool-small"
keep teacher-pool-small-cuda.json
rm -rf "$WORK/pool-small"
try 280 pool "$PYTHON" benchmarks/teacher_pool.py --device cuda --checkpoints 2 --steps 3 --arms two one --unsaved --profile --directory "$WORK/pool"
keep teacher-pool-cuda.json
cp "$WORK"/pool/*-start.txt "$OUT" 2>/dev/null
rm -rf "$WORK/pool"
