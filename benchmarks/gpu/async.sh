#!/usr/bin/env bash
# Sampling ahead in four processes, three seeds of five bounds, then what a writer of the store takes; no GPU. About 960 s on twelve cores, 1080 at most.
# Goes on with the runs in WORK/async.
. "$(dirname "$0")/common.sh"
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
try "${LIMIT:-1000}" async "$PYTHON" benchmarks/async.py --workers 2 --processes 4 --seeds 3 --staleness 0 1 2 4 8 --directory "$WORK/async"
keep async-cpu.json
try 80 store-writer "$PYTHON" benchmarks/store_writer.py --tokens 4000000
keep store-writer-cpu.json
