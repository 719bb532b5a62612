#!/usr/bin/env bash
# Train a recipe on all the GPUs it asks for, one process each, with the overlay checked in each:
# a shell wrapper of `cppmega launch`. It stays in this terminal; Ctrl-C saves a checkpoint and ends.
#
# usage: scripts/train.sh RECIPE [options of cppmega launch]
#   scripts/train.sh RECIPE --tmux NAME ...                     in a tmux session instead
#   NNODES=2 RDZV=host:29500 scripts/train.sh ... --name NAME   on each of several hosts
#   MEGATRON=ROOT                                               import megatron only from ROOT
#   PYTHON=...                                                  use another interpreter
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
recipe=$1
shift
options=(${MEGATRON:+--megatron "$MEGATRON"} ${NNODES:+--nnodes "$NNODES"} ${RDZV:+--rdzv "$RDZV"})
exec "${PYTHON:-python}" -m cppmega launch "$recipe" "${options[@]}" "$@"
