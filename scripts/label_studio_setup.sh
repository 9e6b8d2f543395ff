#!/usr/bin/env bash
# Make an environment with Label Studio in it, apart from the project's own: its dependencies would clash with ours.
# Usage: scripts/label_studio_setup.sh <folder>      (160 packages, 1 GB, some minutes)
set -euo pipefail
folder=${1:?usage: scripts/label_studio_setup.sh <folder>}
version=1.23.2 # what docs/label_tools.md was written with
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet "label-studio==$version"
"$folder/bin/python" -c "import importlib.metadata as m; print('label-studio', m.version('label-studio'))"
echo "next: python scripts/label_studio_round.py --server $folder --run demo experiment=gold"
