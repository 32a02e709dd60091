#!/usr/bin/env bash
# Twelve teachers of 4B, two of them on the card; about 275 s, 330 at most. Wants the card's memory for itself (130 GiB with all resident),
# 105 GB of host memory and 18 GB in WORK.
. "$(dirname "$0")/common.sh"
try 330 pool "$PYTHON" benchmarks/teacher_pool.py --device cuda --checkpoints 2 --steps 3 --arms two one all --unsaved --profile --directory "$WORK/pool"
keep teacher-pool-cuda.json
cp "$WORK"/pool/*-start.txt "$OUT" 2>/dev/null
rm -rf "$WORK/pool"
