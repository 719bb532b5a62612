#!/usr/bin/env bash
# From a fresh clone to a patched Megatron, its proofs, and a training run that shows the difference.
#
# usage: scripts/quickstart.sh
#   VENV=folder       the virtual environment (default .venv)
#   OUT=folder        where the runs are written (default runs/quickstart)
#   SEEDS="1 2 3"     train once per seed and side (default: the recipe's seed alone)
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-runs/quickstart}
export PYTHONWARNINGS=ignore  # Megatron's own, at every import
step() { printf '\n== %s\n' "$*" >&2; }

step "1/6 environment"
python=$(scripts/setup.sh)

step "2/6 apply the patches: python -m cppmega.apply_patches"
"$python" -m cppmega.apply_patches

step "3/6 what one patch changes: cppmega diff dataset_helpers_prebuilt"
"$python" -m cppmega diff dataset_helpers_prebuilt

step "4/6 prove each patch on patched code, on stock and on a do-nothing mutant: cppmega verify"
"$python" -m cppmega verify

step "5/6 train a small GPT with MTP on CPU, stock and patched, from the same seeds"
digest=$("$python" -m cppmega status --json | "$python" -c 'import json,sys; print(json.load(sys.stdin)["digest"])')
corpus=$("$python" -c 'from examples.smoke import corpus; print(corpus.digest(corpus.documents()))')
data=$out/text-$corpus
runs=()
for seed in ${SEEDS:-1234}; do
  stock=$out/stock-$corpus-seed$seed patched=$out/patched-$digest-$corpus-seed$seed
  options=(--data "$data" --seed "$seed")
  [ -e "$stock/summary.json" ] || "$python" scripts/smoke.py train --stock "${options[@]}" --out "$stock"
  [ -e "$patched/summary.json" ] || "$python" -m cppmega.run scripts/smoke.py train "${options[@]}" --out "$patched"
  runs+=("$stock" "$patched")
done

step "6/6 score both models on the true labels of documents that neither was trained on"
"$python" scripts/smoke.py compare --data "$data" "${runs[@]}" --out "$out"

cat <<EOF

overlay $digest is in $("$python" -c 'from cppmega.tree.installed import find_root; print(find_root())')
next:
  $python -m cppmega list              every patch, one line each
  $python -m cppmega explain NAME      what one does, and why
  torchrun --nproc_per_node N -m cppmega.run YOUR_SCRIPT    train with the overlay proved in every rank
EOF
