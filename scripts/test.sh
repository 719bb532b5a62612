#!/usr/bin/env bash
# Install what the tests need, then run everything: lint, types, tests.
#
# usage: scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(scripts/setup.sh)
bin=$(dirname "$python")
if ! command -v tmux >/dev/null; then
  # The launcher's sessions are tested in real tmux sessions.
  echo "== tmux" >&2
  { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq >&2 &&
    apt-get install -y -qq --no-install-recommends tmux >&2; } ||
    echo "test: tmux is missing and cannot be installed (apt-get install tmux, as root);" \
      "the tests of sessions are skipped" >&2
fi
# Without bytecode, every one of the processes that the tests start compiles the package again.
unset PYTHONDONTWRITEBYTECODE
# Each process of the tests would use all cores.
export OMP_NUM_THREADS=1
echo "== ruff" >&2
"$bin/ruff" check .
"$bin/ruff" format --check .
echo "== mypy --strict beside pytest: it has one process, and pytest's often wait" >&2
found=$(mktemp)
"$bin/mypy" >"$found" 2>&1 &
mypy=$!
trap 'kill $mypy 2>/dev/null || true; rm -f "$found"' EXIT
status=0
# One more process than CI has cores: a quarter of the time, each waits for what it has started.
"$python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@" || status=$?
wait $mypy || status=1
echo "== mypy --strict" >&2
cat "$found"
exit $status
