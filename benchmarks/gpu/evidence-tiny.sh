#!/usr/bin/env bash
# Tiny models: specialists into one student, five seeds of fourteen arms and three merges; no GPU. About 600 s on nine cores.
# What is in WORK/tiny or, where that is not there, in OUTDIR/tiny.tgz is not repeated: the same command goes on.
. "$(dirname "$0")/common.sh"
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
[ -d "$WORK/tiny" ] || [ ! -f "$OUT/tiny.tgz" ] || tar -xzf "$OUT/tiny.tgz" -C "$WORK"
sizes=(--edition tiny --directory "$WORK/tiny" --workers "${WORKERS:-9}" --seeds 0 1 2 3 4 --arms opd-exact opd-topk opd-sampled
  opd-need opd-forward opd-exact-reward opd-topk-reward opd-sampled-reward mixed-rl cascaded-rl sft-gold sft-gold-rl sft-teacher sft-teacher-opd
  merge-average merge-task-arithmetic merge-ties)
try "${LIMIT:-900}" tiny "$PYTHON" benchmarks/integrate.py "${sizes[@]}"
try 60 tiny-report "$PYTHON" benchmarks/integrate.py report "${sizes[@]}" # of what is there
keep integration-tiny.json
tar -czf "$OUT/tiny.tgz" -C "$WORK" tiny/entries
