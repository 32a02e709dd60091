# Read by every part. OUT: results and logs. WORK: models and runs, which parts share. PYTHON: an environment with opd and torch for CUDA.
set -u
PART=$(basename "$0" .sh)
OUT=${1:?usage: bash benchmarks/gpu/$PART.sh OUTDIR}
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) || exit 1
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
WORK=${WORK:-${TMPDIR:-/tmp}/opd-gpu}
mkdir -p "$WORK" && WORK=$(cd "$WORK" && pwd) || exit 1
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo "$PWD/.venv/bin/python" || echo python3)}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
touch "$WORK/.$PART"

# try SECONDS NAME COMMAND…: for so long at most. What it prints is NAME.log, how it ended a line of PART.jsonl; the part goes on.
try() {
  local limit=$1 name=$2 begun=$SECONDS code=0
  shift 2
  timeout --kill-after 10 "$limit" "$@" >"$OUT/$name.log" 2>&1 || code=$?
  printf '{"part": "%s", "command": "%s", "exit": %d, "seconds": %d}\n' "$PART" "$name" "$code" $((SECONDS - begun)) | tee -a "$OUT/$PART.jsonl"
  return "$code"
}

# keep NAME…: results that this part has written, beside its logs.
keep() {
  local name
  for name in "$@"; do
    if [ "benchmarks/results/$name" -nt "$WORK/.$PART" ]; then cp "benchmarks/results/$name" "$OUT/$name"; fi
  done
}
