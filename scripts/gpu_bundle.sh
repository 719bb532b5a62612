#!/usr/bin/env bash
# Pack what cppmega needs on a GPU host that has torch and no network: its own dependencies, and
# whatever else is named. Megatron and Transformer Engine are installed from wheels, as on any host.
#
# usage: scripts/gpu_bundle.sh OUT_DIR [REQUIREMENT | WHEEL]...
#   scripts/gpu_bundle.sh .gpu                                      # cppmega's dependencies alone
#   scripts/gpu_bundle.sh .gpu megatron-core==0.19.2 ./te.whl       # and these, without their dependencies
#   EXTRAS=data scripts/gpu_bundle.sh .gpu                          # and the packages that prepare data there
# mamba-ssm is a source archive, which makes a wheel without a compiler:
#   MAMBA_FORCE_BUILD=TRUE MAMBA_SKIP_CUDA_BUILD=TRUE \
#     python -m pip wheel --no-deps --no-build-isolation mamba-ssm==2.3.2.post1
# on the host
#   mkdir -p SITE && tar -xJf site-cppmega.tar.xz -C SITE && export PYTHONPATH=SITE
# Tests and benchmarks that compare with a pristine release download it; without network, link a
# folder that holds it: ln -s SITE ~/.cache/cppmega/trees/0.19.2 (or transformer_engine-2.20.2)
#
# PYTHON is an interpreter with pip; TARGET is the Python version of the host (default 3.12).
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,17s/^# \{0,1\}//p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")/.." && pwd)
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

platforms=()
for glibc in 2_39 2_34 2_28 2_27 2_24 2_17; do
  platforms+=(--platform "manylinux_${glibc}_x86_64")
done
fetch() {
  "$python" -m pip download -q --only-binary=:all: --implementation cp \
    --python-version "${TARGET:-3.12}" "${platforms[@]}" --platform manylinux2014_x86_64 \
    -d "$work/wheels" "$@"
}

"$python" - "$here/pyproject.toml" "$work" ${EXTRAS:-} <<'P'
import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
extras = [line for name in sys.argv[3:] for line in project["optional-dependencies"][name]]
Path(sys.argv[2], "requirements.txt").write_text("\n".join(project["dependencies"]))
Path(sys.argv[2], "extras.txt").write_text("\n".join(extras))
P
fetch -r "$work/requirements.txt"
[ -z "${EXTRAS:-}" ] || fetch --no-deps -r "$work/extras.txt"
for wanted in "$@"; do
  if [ -f "$wanted" ]; then cp "$wanted" "$work/wheels"; else fetch --no-deps "$wanted"; fi
done
for wheel in "$work"/wheels/*.whl; do
  "$python" -m zipfile -e "$wheel" "$work/site"
done
tar -C "$work/site" -cf - . | xz -T0 -6 > "$out/site-cppmega.tar.xz"
ls -l "$out/site-cppmega.tar.xz"
