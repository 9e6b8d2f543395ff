#!/usr/bin/env bash
# Measurements on a GPU, in parts that each end within nine minutes; none needs a network.
#
#   scripts/gpu/run.sh PART [--out FOLDER]  one part; prints a table and writes FOLDER/PART.json (gpu-figures);
#                                         PART.jsonl has each contestant as soon as it has ended, should the limit stop the part
#   scripts/gpu/run.sh all  [--out FOLDER]  every part that measures; ends with 1 if one of them failed
#   scripts/gpu/run.sh list                 the parts
#   scripts/gpu/run.sh wheels [--out FOLDER]  where there is a network: FOLDER/wheels with what a GPU machine's Python lacks,
#                                         DeepSpeed and its requirements; a part that finds WHEELS=FOLDER/wheels installs them first
#
# DEVICE=cpu SIZE=tiny rehearses a part on any machine. PYTHON chooses the interpreter, REPEATS the rounds that count,
# SECONDS_PART the limit of a part, ONLY the contestants (all unless set; "ours;generate"). Contestants work one after the other,
# since their memory would add up on the card. TRL 1.12.0 takes part if its environment is in BENCH_PEERS. `sentiment` and
# `dialogue` are not part of `all`: they need CHECKPOINT and data, take SEED and, as further settings, MORE, and continue where
# the limit stopped them.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
device="${DEVICE:-cuda}"
size="${SIZE:-full}"
repeats="${REPEATS:-3}"
limit="${SECONDS_PART:-540}"
out="gpu-figures"
measuring=(tests pretrain decode ppo ppo13 chat13)

list() {
  cat <<'EOF'
tests     the tests marked gpu: sampler against generate, losses, first PPO update, in float32 and bf16
pretrain  tokens/s and MFU of the shapes of gpt2 and gpt2-xl, against transformers' GPT-2
decode    tokens/s at batch 1, 32 and 256 and the share of memory bandwidth, against generate
ppo       a PPO update of the 124M shape: rollout, scoring, training, memory; against TRL 1.12.0
ppo13     the same for the 1.3B shape
chat13    DeepSpeed-Chat's step 3: 1.3B actor, 350M reward model and critic, 256 + 256 tokens, 1024 episodes, one epoch
sentiment experiment=sentiment from CHECKPOINT (a folder or GGUF file) and CORPUS (text), SEED; a second call continues it
dialogue  experiment=dialogue from CHECKPOINT, COMPARISONS, DEMONSTRATIONS and JUDGE (a folder), SEED; the same
EOF
}

python="${PYTHON:-}"
if [ -z "$python" ]; then
  python="$root/.venv/bin/python"
  [ -x "$python" ] || python=python3
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export BENCH_PEERS="${BENCH_PEERS:-$root/.venv-bench}"

bench() {  # bench NAME SCRIPT CASE: a benchmark on the device; the rehearsal has cases of its own
  local options=(--device "$device" --repeats "$repeats" --apart --out "$out/$1.json")
  if [ "$size" = tiny ]; then options+=(--quick --threads 1); fi
  if [ -n "$3" ]; then options+=(--case "$3"); fi
  if [ "$2" = ppo ] && { [ "$1" = chat13 ] || [ ! -x "$BENCH_PEERS/trl-1.12.0/bin/python" ]; }; then
    options+=(--only ours)
  elif [ -n "${ONLY:-}" ]; then
    options+=(--only "$ONLY")
  fi
  timeout -k 10 "$limit" "$python" "$root/scripts/bench/$2.py" "${options[@]}"
}

preset() {  # preset NAME SETTING…: every stage, with its report in FOLDER; SIGTERM at the limit writes a checkpoint
  local run="$1-${SEED:-0}" settings=("experiment=$1" "model.pretrained=$CHECKPOINT" "seed=${SEED:-0}" "device=$device" "${@:2}")
  timeout -k 60 "$limit" "$python" -m rlhf pipeline "${settings[@]}" "run=$run" "runs_dir=$out/runs" tracking=jsonl ${MORE:-}
  cp "$out/runs/$run/report.html" "$out/$run.html"
  cp "$out/runs/$run/evaluate/results.json" "$out/$run.json"
}

wheels() {  # without torch, numpy and pydantic, which every image for GPUs has; the folder fits a transfer of 64 MiB
  local folder="$out/wheels" size
  mkdir -p "$folder"
  DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "$python" -m pip wheel -q --no-build-isolation --no-deps -c "$root/constraints.txt" -w "$folder" \
    deepspeed einops hjson msgpack ninja py-cpuinfo
  size="$(du -sm "$folder" | cut -f1)"
  echo "$folder: $(ls "$folder" | wc -l) wheels, $size MiB"
  [ "$size" -le 60 ] || { echo "$folder: $size MiB: want at most 60: remove what the machine has" >&2; return 1; }
}

full() { if [ "$size" = tiny ]; then echo "${2:-}"; else echo "$1"; fi; }

part() {
  mkdir -p "$out"
  if [ -n "${WHEELS:-}" ]; then "$python" -m pip install -q --no-index --no-deps "$WHEELS"/*.whl || return; fi
  case "$1" in
    tests) timeout -k 10 "$limit" "$python" "$root/scripts/gpu/tests.py" --device "$device" --out "$out/tests.json" ;;
    pretrain) bench pretrain pretraining "" ;;
    decode) bench decode generation "$(full gpt2 whole)" ;;
    ppo) bench ppo ppo "$(full gpt2 quick)" ;;
    ppo13) bench ppo13 ppo "$(full 1.3b quick)" ;;
    chat13) bench chat13 ppo deepspeed-chat ;;
    sentiment)
      if [ -z "${CHECKPOINT:-}" ] || [ -z "${CORPUS:-}" ]; then
        echo "sentiment: CHECKPOINT or CORPUS is not set: want a folder or GGUF file of a model, and a file of text" >&2; exit 2
      fi
      preset sentiment "data.corpus=$CORPUS" ;;
    dialogue)
      if [ -z "${CHECKPOINT:-}" ] || [ -z "${COMPARISONS:-}" ] || [ -z "${DEMONSTRATIONS:-}" ] || [ -z "${JUDGE:-}" ]; then
        echo "dialogue: CHECKPOINT, COMPARISONS, DEMONSTRATIONS or JUDGE is not set: want two models and two files" >&2; exit 2
      fi
      preset dialogue "data.comparisons=$COMPARISONS" "data.prompts=$COMPARISONS" "data.demonstrations=$DEMONSTRATIONS" "judge.model=$JUDGE" ;;
  esac
}

[ $# -ge 1 ] || { echo "usage: scripts/gpu/run.sh PART [--out FOLDER]: want one of the parts below, or all" >&2; list >&2; exit 2; }
what="$1"; shift
while [ $# -gt 0 ]; do
  case "$1" in
    --out) [ $# -ge 2 ] || { echo "--out: want a folder" >&2; exit 2; }; out="$2"; shift 2 ;;
    *) echo "$1: not an option: want --out FOLDER" >&2; exit 2 ;;
  esac
done
case "$what" in
  list|help|-h|--help) list ;;
  wheels) wheels ;;
  all)
    failed=0
    for name in "${measuring[@]}"; do
      echo "== $name"
      part "$name" || { echo "== $name: failed or ran past $limit s" >&2; failed=1; }
    done
    exit $failed ;;
  tests|pretrain|decode|ppo|ppo13|chat13|sentiment|dialogue) part "$what" ;;
  *) echo "$what: no such part: want one of these, or all" >&2; list >&2; exit 2 ;;
esac
