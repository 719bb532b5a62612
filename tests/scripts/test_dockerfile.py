"""The steps of the Dockerfile, run in a clean root without network: no builder is needed.

The root is a copy-on-write view of this machine in a namespace of its own. The base image is a new
environment, and what pip would download is linked into it from the one that runs the tests.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import REPOSITORY, distributions, pristine
from tests.support.weekly import weekly

pytestmark = [pytest.mark.slow, weekly]

ROOT = """
mount -t tmpfs none "$1" && mkdir "$1/up" "$1/work" "$1/root" || exit 77
mount -t overlay none -o "lowerdir=/,upperdir=$1/up,workdir=$1/work" "$1/root" || exit 77
mount --bind /dev "$1/root/dev" && mount -t proc proc "$1/root/proc" || exit 77
exec chroot "$1/root" /usr/bin/env -i PATH=/image/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \\
    PIP_NO_INDEX=1 PIP_NO_BUILD_ISOLATION=0 PIP_DISABLE_PIP_VERSION_CHECK=1 bash -e "$2"
"""
APT = """#!/bin/sh
test "$1" = update && exit
for name; do case "$name" in install|-*) ;; *) dpkg -s "$name" >/dev/null || exit 1;; esac; done
"""
"""There is no network: what is installed must be the name of a package that is here."""


def instructions(text: str) -> Iterator[tuple[str, str]]:
    joined = re.sub(r"\\\\\n", " ", text)
    for line in joined.splitlines():
        if line.strip() and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            yield word, rest


def steps(text: str, source: Path) -> Iterator[str]:
    """The instructions as a script; `source` is what the builder would be given."""
    begun = False
    for word, rest in instructions(text):
        if word == "FROM":
            begun = True
        elif word in ("ARG", "ENV"):
            name, _, value = rest.partition("=")
            yield f"export {name}={shlex.quote(value)}" if begun else ""
        elif word == "COPY":
            here, there = rest.split()
            yield f"cp -a {shlex.quote(str(source / here))}/. {there}"
        elif word == "RUN":
            yield f"/bin/sh -c {shlex.quote(rest)}"
        elif word == "WORKDIR":
            yield f"mkdir -p {rest} && cd {rest}"
        else:
            assert (word, rest) == ("ENTRYPOINT", '["cppmega"]'), (word, rest)
            yield "cppmega --version; python -m cppmega.apply_patches --check"


def test_its_steps_run_in_a_clean_root(tmp_path: Path) -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text().replace("**/", "").split()
    source, image, mounted = tmp_path / "source", Path("/image"), tmp_path / "root"
    shutil.copytree(REPOSITORY, source, ignore=shutil.ignore_patterns(*ignored), symlinks=True)
    site = tmp_path / "site"
    shutil.copytree(pristine("0.19.2"), site)
    needed = distributions.required("cppmega", "megatron-core", "torch", "hatchling")
    distributions.link(needed - {"cppmega", "megatron-core"}, site)
    apt = tmp_path / "apt-get"
    apt.write_text(APT)
    apt.chmod(0o755)
    mounted.mkdir()
    packages = f"{image}/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    script = tmp_path / "script.sh"
    script.write_text(
        "\n".join(
            [
                f"{shlex.quote(sys.executable)} -m venv {image}",
                f"cp -a {site}/. {packages}/ && cp {apt} {image}/bin/",
                *steps((REPOSITORY / "scripts/Dockerfile").read_text(), source),
                "test ! -e /src && test -d /runs && test -w .",
            ]
        )
    )
    done = subprocess.run(
        ["unshare", "--mount", "--net", "bash", "-c", ROOT, "-", str(mounted), str(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 77 or "Operation not permitted" in done.stderr:
        pytest.skip(f"this machine does not allow mounts in a namespace: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"[1-9]\d* applied", done.stderr), done.stderr[-3000:]
    assert not image.exists() and not Path("/src").exists()
