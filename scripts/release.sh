#!/usr/bin/env bash
# Build the sdist and the wheel of a release, check them, and install the wheel where nothing else is.
#
# usage: scripts/release.sh [FOLDER]              default: dist/
#        scripts/release.sh prepare VERSION      give VERSION to the entries under [Unreleased]
#
# It publishes nothing: it ends with the commands that would. The version is `cppmega.__version__` and
# must be the newest release of CHANGELOG.md; CONTRIBUTING.md says when which part of it rises.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = prepare ]; then
  exec python3 scripts/cut_release.py "${2:?usage: scripts/release.sh prepare VERSION}"
fi
out=${1:-dist}
fail() { echo "release: $*" >&2; exit 1; }

version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' cppmega/__init__.py)
newest=$(sed -n 's/^## \[\([0-9][^]]*\)\].*/\1/p' CHANGELOG.md | head -1)
[ "$version" = "$newest" ] || fail "cppmega is $version, but CHANGELOG.md ends with $newest; make them agree"
grep -q "^version = \"$version\"$" pyproject.toml || fail "pyproject.toml has another version than $version"
sed '1,/^## \[Unreleased\]/d; /^## \[/,$d' CHANGELOG.md | grep -q "^- " &&
  fail "CHANGELOG.md has entries that belong to no release; scripts/release.sh prepare VERSION gives them one"
grep -q '^repository = "https://' pyproject.toml ||
  fail "pyproject.toml states no address of the repository ([tool.hatch.metadata.hooks.custom] repository)," \
    "which the links of the package and of its site need; state where it is published"
[ -z "$(git status --porcelain)" ] || fail "the tree has changes that no commit has; commit or stash them"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python=$(scripts/setup.sh)
"$python" -m venv "$work/tools"
"$work/tools/bin/pip" install -q build twine
echo "== sdist and wheel" >&2
build() { "$work/tools/bin/python" -m build --outdir "$work/dist" "$@" >"$work/log" || { cat "$work/log" >&2; exit 1; }; }
build .
build --wheel distributions/kernels
"$work/tools/bin/twine" check --strict "$work"/dist/*
echo "== installed alone" >&2
"$python" -m venv "$work/alone"
"$work/alone/bin/pip" install -q "$work"/dist/cppmega-"$version"-*.whl
cd /
[ "$("$work/alone/bin/cppmega" --version)" = "cppmega, version $version" ] || fail "the wheel has another version"
"$work/alone/bin/cppmega" list >/dev/null
cd - >/dev/null
mkdir -p "$out"
cp "$work"/dist/* "$out"
cat <<END
$(ls "$out"/cppmega*-"$version"*)
next: git tag -a v$version -m "cppmega $version" && git push origin v$version
      twine upload $out/cppmega*-$version*
      mike deploy --push $version latest
END
