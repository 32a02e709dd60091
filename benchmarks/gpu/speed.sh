#!/usr/bin/env bash
# A step by phases beside TRL's, decode steps, top-k, curves; about 710 s, 1020 at most. Wants the card for itself. Without TRL (pip install
# --no-deps trl==1.16.0) it is left out.
. "$(dirname "$0")/common.sh"
models=(--models "$WORK/models") peer=()
"$PYTHON" -c "import trl, datasets" 2>/dev/null && peer=(--trl --trl-limit 130)
try 300 step "$PYTHON" benchmarks/step_gpu.py --cases smol equal --steps 2 --profile "${models[@]}" "${peer[@]}" --out "$OUT/step-cuda.json"
try 40 decode "$PYTHON" benchmarks/decode.py "${models[@]}"
keep decode-cuda.json
try 40 topk "$PYTHON" benchmarks/topk.py
keep topk-cuda.json
try 110 step-lora "$PYTHON" benchmarks/step_gpu.py --cases lora --memory 24 "${models[@]}" --out "$OUT/step-lora-cuda.json"
try 190 step-ragged "$PYTHON" benchmarks/step_gpu.py --cases ragged --steps 2 "${models[@]}" "${peer[@]}" --out "$OUT/step-ragged-cuda.json"
try 240 curves "$PYTHON" benchmarks/step_curves.py "${models[@]}"
keep step-curves.json
try 100 decode-compiled "$PYTHON" benchmarks/decode.py --compiled --shapes 135M "${models[@]}"
keep decode-compiled-cuda.json
