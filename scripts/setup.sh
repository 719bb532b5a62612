#!/usr/bin/env bash
# Create the virtual environment that quickstart.sh and test.sh use; a second run takes a second.
#
# usage: scripts/setup.sh          VENV=folder (default .venv), prints the environment's python
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(realpath -m "${VENV:-.venv}")
torch=2.11.0
megatron=0.19.2
stamp=$venv/cppmega-$(cat pyproject.toml scripts/setup.sh | cksum | tr -d ' ')

say() { echo "setup: $*" >&2; }

# A python3.12 on PATH may be a shim that refuses to start, so every candidate is tried.
starts() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }

find_python() {
  local candidate
  if command -v uv >/dev/null 2>&1 && candidate=$(uv python find 3.12 2>/dev/null) && starts "$candidate"; then
    echo "$candidate"; return
  fi
  for candidate in python3.12 python3 python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
    if starts "$candidate"; then echo "$candidate"; return; fi
  done
  say "error: no-python"
  say "  what: none of uv, python3.12, python3 and pyenv's versions starts Python 3.12 with venv."
  say "  why:  CI tests Python 3.12; megatron-core >= 0.17 has wheels for 3.12 and 3.13 only."
  say "  next: install one (uv python install 3.12, or pyenv install 3.12) and run this again"
  return 1
}

pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" 2>&1 | grep -v '^WARNING' >&2 || true; }

# uv takes a quarter of pip's time; where it finds no packages, since only pip knows the index, pip installs them.
install() {
  "$venv/bin/python" -m uv pip install --quiet --compile-bytecode --python "$venv/bin/python" "$@" >&2 ||
    { say "uv did not install them; pip tries"; pip "$@"; }
}

if [ ! -e "$stamp" ]; then
  python=$(find_python)
  say "$("$python" --version) at $python -> $venv"
  "$python" -m venv --clear "$venv"
  pip uv
  say "installing torch $torch and megatron-core $megatron (5 GB, about a minute)"
  install "torch==$torch" "megatron-core==$megatron" psutil
  say "installing cppmega and its development tools"
  install hatchling editables -e '.[dev]'
  "$venv/bin/python" -c 'import torch, megatron.core, cppmega, libcst, pytest, matplotlib' >/dev/null 2>&1 ||
    { say "the installation is not complete; see the messages above"; exit 1; }
  touch "$stamp"
fi
echo "$venv/bin/python"
