#!/usr/bin/env bash
# Install what the tests need, and run them all: lint, types, tests.
#
# usage: scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(scripts/setup.sh)
bin=$(dirname "$python")
echo "== ruff" >&2
"$bin/ruff" check .
"$bin/ruff" format --check .
echo "== mypy --strict" >&2
"$bin/mypy"
echo "== pytest" >&2
exec "$python" -m pytest -n 2 --dist loadfile "$@"
