#!/usr/bin/env bash
# From a fresh clone to a patched Megatron, its proofs, and a training that shows the difference.
#
# usage: scripts/quickstart.sh      VENV=folder (default .venv), OUT=folder (default runs/quickstart)
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-runs/quickstart}
export PYTHONWARNINGS=ignore  # Megatron's own, at every import
step() { printf '\n== %s\n' "$*" >&2; }

step "1/6 environment"
python=$(scripts/setup.sh)

step "2/6 apply: python -m cppmega.apply_patches"
"$python" -m cppmega.apply_patches

step "3/6 what one patch changes: cppmega diff dataset_helpers_prebuilt"
"$python" -m cppmega diff dataset_helpers_prebuilt

step "4/6 each patch's behaviour on patched code, on stock and on a do-nothing mutant: cppmega verify"
"$python" -m cppmega verify

step "5/6 train a small GPT with MTP on CPU, stock and patched, same seeds"
[ -e "$out/stock/summary.json" ] || "$python" scripts/smoke.py train --stock --data "$out/data" --out "$out/stock"
digest=$("$python" -m cppmega status --json | "$python" -c 'import json,sys; print(json.load(sys.stdin)["digest"])')
patched=$out/patched-$digest
[ -e "$patched/summary.json" ] || "$python" -m cppmega.run scripts/smoke.py train --data "$out/data" --out "$patched"

step "6/6 both models on the true labels"
"$python" scripts/smoke.py compare --data "$out/data" "$out/stock" "$patched" --out "$out"

cat <<EOF

overlay $digest is in $("$python" -c 'from cppmega.tree.installed import find_root; print(find_root())')
next:
  $python -m cppmega list              every patch, one line each
  $python -m cppmega explain NAME      what one does, and why
  torchrun --nproc_per_node N -m cppmega.run YOUR_SCRIPT    train with the overlay proved in every rank
EOF
