#!/usr/bin/env bash
# The peers' environments, each made once, in .venv-bench (or BENCH_PEERS): TRL 1.12.0 is the last release with PPO.
# transformers and trl 1.16, the other peers, are in the project's own environment.
#   PYTHON=python3.12 bash scripts/bench/setup.sh    another interpreter
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
peers="${BENCH_PEERS:-$root/.venv-bench}"
python="${PYTHON:-$root/.venv/bin/python}"
[ -x "$(command -v "$python")" ] || python=python3
trl=1.12.0
home="$peers/trl-$trl"
if [ ! -f "$home/ready" ]; then
  "$python" -m venv --clear "$home"
  mkdir -p "$peers"
  # the project's pins, so that torch and transformers are the same on both sides; only trl is older
  grep -v '^trl==' "$root/constraints.txt" > "$home/constraints.txt"
  echo "trl==$trl" >> "$home/constraints.txt"
  "$home/bin/python" -m pip install --progress-bar off --quiet -c "$home/constraints.txt" torch transformers trl accelerate datasets
  touch "$home/ready"
fi
"$home/bin/python" -c 'import torch, transformers, trl; print("torch", torch.__version__, "transformers", transformers.__version__, "trl", trl.__version__)'
echo "peers are in $peers"
