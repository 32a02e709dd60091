#!/usr/bin/env bash
# The quickstart's processor seconds, and a step beside TRL's, on two cores; no GPU. About 250 s, 540 at most. Can run beside speed.sh.
. "$(dirname "$0")/common.sh"
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1
alone=()
"$PYTHON" -c "import trl, datasets" 2>/dev/null || alone=(--alone)
run=$(mktemp -d "$WORK/quickstart.XXXX")
TIMEFORMAT='{"seconds": %R, "user": %U, "system": %S}'
{ time try 240 quickstart "$PYTHON" -m opd.cli run quickstart --out "$run/run"; } 2>"$OUT/quickstart-seconds.json"
cp "$run/run/summary.json" "$OUT/quickstart-summary.json" 2>/dev/null
rm -rf "$run"
try 300 step-cpu "$PYTHON" benchmarks/step.py --model random --steps 2 "${alone[@]}" --out "$OUT/step-cpu.json"
