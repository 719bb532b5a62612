#!/usr/bin/env bash
# Train a recipe on all the GPUs it names, one process each, with the overlay proved in every one.
#
# usage: scripts/train.sh RECIPE [options of scripts/train.py]
#   NNODES=2 RDZV=host:29500 scripts/train.sh ...   on every one of several hosts
#   MEGATRON=ROOT                                   import megatron from ROOT and no other folder
#   PYTHON=...                                      another interpreter
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python}
nodes=${NNODES:-1}
root=(${MEGATRON:+--megatron "$MEGATRON"})
export PYTHONPATH=$(dirname "$here")${PYTHONPATH:+:$PYTHONPATH}

# `--set gpus=4` counts, so the recipe is asked with the same words that the trainer gets.
gpus=$("$python" -m cppmega.recipes_index "$@")
# What files can tell is said once, before a process per GPU would say it.
RANK=0 WORLD_SIZE=$gpus "$python" "$here/train.py" "$@" "${root[@]}" --dry-run > /dev/null
if [ "$nodes" -gt 1 ]; then
  where=(--nnodes "$nodes" --rdzv_backend c10d --rdzv_endpoint "${RDZV:?set RDZV=host:port}")
else
  where=(--standalone)
fi
exec "$python" -m torch.distributed.run "${where[@]}" --nproc_per_node $((gpus / nodes)) \
  -m cppmega.run "${root[@]}" "$here/train.py" "$@"
