#!/usr/bin/env bash
# Test the oldest, a middle and the newest torch, Triton and Python of the declared range.
#
# usage: scripts/stacks.sh [oldest] [middle] [newest] [nightly] [--steps apply,verify,...]
#        STEPS of CI: scripts/stacks.sh newest --steps apply,subset
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(scripts/setup.sh)
exec "$python" -m benchmarks.stacks "$@"
