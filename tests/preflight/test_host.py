"""Preflight of the host and its folders: each check broken, and each healthy."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cppmega.checkpoints.tracker import TRACKER
from cppmega.preflight import examine as preflight
from cppmega.preflight.checks import limits
from cppmega.preflight.checks.limits import Host
from cppmega.preflight.context import Context
from cppmega.preflight.findings import Remark
from cppmega.recipe import index as recipes_index
from tests.preflight.contexts import GIB, SLICE, SMOKE, holds, launch, refuses, says_nothing
from tests.support import patched

pytestmark = pytest.mark.slow


# -- the host ----------------------------------------------------------------------------------


def test_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    eight = SLICE.with_(gpus=8, global_batch_size=8)
    says_nothing("hosts", launch(eight))
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.7")
    assert "4 GPUs on each of 2 hosts" in holds("hosts", launch(eight, nodes=2))
    refuses("hosts", "wrong-world-size", launch(eight, nodes=3))
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    refuses("hosts", "host-name-unknown", launch(eight, nodes=2))

    def unknown(name: str) -> str:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    refuses("hosts", "host-name-unknown", launch(eight, nodes=2))
    # One host: cppmega launch does not use the name, torchrun does.
    (alone,) = preflight.answers("hosts", launch(eight))
    assert alone.is_remark and "--local-addr 127.0.0.1" in alone.what
    launched = holds("hosts", launch(eight, folder=Path("runs/one")))
    assert launched.endswith("the ranks meet at 127.0.0.1")


def test_interfaces() -> None:
    names = [name for _, name in socket.if_nameindex()]
    says_nothing("hosts", launch(SLICE, environ={"NCCL_SOCKET_IFNAME": "^docker"}))
    holds("hosts", launch(SLICE, environ={"NCCL_SOCKET_IFNAME": names[0][:2]}))
    holds("hosts", launch(SLICE, environ={"NCCL_SOCKET_IFNAME": f"={names[0]}"}))
    for variable, value in (("NCCL_SOCKET_IFNAME", "ib9"), ("GLOO_SOCKET_IFNAME", names[0][:1])):
        found = refuses("hosts", "no-such-interface", launch(SLICE, environ={variable: value}))
        assert names[0] in found.what


def test_limits_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    good = Host(files=65536, shared=16 * GIB, memory=100 * GIB)
    poor = Host(files=1024, shared=64 * 2**20, memory=10 * GIB)
    monkeypatch.setattr(limits, "measure", lambda: good)
    holds("limits", launch(SLICE, training_machine=True))
    monkeypatch.setattr(limits, "measure", lambda: poor)
    assert "ulimit -n" in refuses("limits", "host-limit", launch(SLICE, training_machine=True)).next
    assert [error.name for error in limits.shortages(poor, ranks=2)] == ["host-limit"] * 3
    says_nothing("limits", launch(SMOKE, training_machine=True))
    for field in ("hidden_size", "ffn_hidden_size"):
        wide = launch(SMOKE.with_(**{field: 2**40}), training_machine=True)
        assert "takes" in refuses("limits", "host-limit", wide).what
    monkeypatch.setattr(limits, "measure", lambda: replace(poor, files=20))
    refuses("limits", "host-limit", launch(SMOKE))


@pytest.mark.parametrize(
    ("most", "command"), [(8192, "ulimit -n 8192"), (2**31, "ulimit -n 65536"), (1024, "--ulimit")]
)
def test_the_soft_limit_counts_and_the_hard_one_says_what_helps(most: int, command: str) -> None:
    host = Host(files=1024, shared=16 * GIB, memory=100 * GIB, most_files=most)
    (error,) = limits.shortages(host, ranks=1)
    assert command in error.next and str(most) in error.what


def test_what_the_kernel_says_of_this_host() -> None:
    """A rank has the soft limit: nothing raises it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        host = limits.measure()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert host.files == min(soft, 512) and host.most_files in (hard, 2**31)
    assert 0 < host.memory <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# -- folders -----------------------------------------------------------------------------------


def saving(folder: Path, **more: Any) -> Context:
    return launch(SLICE, "--mock-data", "--save", str(folder), root=patched("0.19.2"), **more)


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--save" in holds("folders", saving(tmp_path / "new" / "folder"))
    (tmp_path / "file").write_text("")
    refuses("folders", "folder-not-writable", saving(tmp_path / "file" / "below"))
    refuses("folders", "folder-not-writable", launch(SMOKE, folder=Path("/proc/run")))
    usage = type("Usage", (), {"free": 10 * GIB})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    found = refuses("folders", "disk-full", saving(tmp_path))
    assert "10.0 GiB free" in found.what
    assert "nowhere" in holds("folders", launch())
    whole_line = launch(None, "--bf16", "--save", str(tmp_path / "file" / "below"))
    refuses("folders", "folder-not-writable", whole_line)


def test_the_host_has_memory_for_the_copies_of_an_asynchronous_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 75.9 GiB, by the ranks of this host."""
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 999 * GIB}))
    recipe = recipes_index.load("nam56r_h200_2gpu_ep2").with_(async_save=True)
    words = ("--mock-data", "--save", str(tmp_path))
    for hosts, too_little, enough in ((1, 75, 77), (2, 37, 38)):
        context = launch(recipe, *words, root=patched("0.19.2"))
        context.training_machine, context.nodes = True, hosts
        monkeypatch.setattr("cppmega.host.memory.available", partial(int, enough * GIB))
        holds("folders", context)
        monkeypatch.setattr("cppmega.host.memory.available", partial(int, too_little * GIB))
        refuses("folders", "host-limit", context)
        context.training_machine = False  # another host will train
        holds("folders", context)


@pytest.mark.parametrize(
    ("changes", "free", "said"),
    [
        ({}, 75, None),
        ({}, 77, "room for 1 of the 2 checkpoints that will exist at once (--set keep_check"),
        ({}, 153, ""),
        ({"keep_checkpoints": 1}, 77, "room for 1 of the 2 checkpoints that will exist at once"),
        ({"keep_checkpoints": 1, "train_iters": 500}, 77, ""),
        ({"train_iters": 2000}, 153, "room for 2 of the 4 checkpoints"),
        ({"train_iters": 2000, "keep_checkpoints": 1}, 153, ""),
        ({"train_iters": 2000, "keep_checkpoints": 2}, 153, "room for 2 of the 3 checkpoints"),
    ],
)
def test_the_disk_has_room_for_checkpoints_of_the_whole_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, int],
    free: int,
    said: str | None,
) -> None:
    """Of 75.9 GiB each; one is needed, and what more there is no room for is said."""
    recipe = recipes_index.load("nam56r_h200_2gpu_ep2").with_(
        **{"train_iters": 1000, "keep_checkpoints": 0, **changes}
    )
    usage = type("Usage", (), {"free": free * GIB})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    words = ("--mock-data", "--save", str(tmp_path))
    context = launch(recipe, *words, root=patched("0.19.2"))
    if said is None:
        found = refuses("folders", "disk-full", context)
        assert "it needs 75.9 GiB" in found.what
        weights = launch(recipe, *words, "--no-save-optim", root=patched("0.19.2"))
        assert holds("folders", weights)
        return
    text = holds("folders", context)
    assert isinstance(text, Remark) == bool(said) and said in text
    assert not said or "each of 75.9 GiB, of which 10.8 GiB are weights" in text


def test_a_checkpoint_that_is_there_is_replaced_by_one_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipes_index.load("nam56r_h200_2gpu_ep2").with_(keep_checkpoints=1, train_iters=1000)
    usage = type("Usage", (), {"free": 77 * GIB})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    (tmp_path / TRACKER).write_text("500")
    context = launch(recipe, "--mock-data", "--save", str(tmp_path), root=patched("0.19.2"))
    assert not isinstance(holds("folders", context), Remark)


@pytest.mark.parametrize("flag", ["--save", "--metrics"])
def test_folders_of_a_loop(tmp_path: Path, flag: str) -> None:
    (tmp_path / "file").write_text("")
    holds("folders", launch(SMOKE, flag, str(tmp_path / "new" / "file")))
    for words in ([flag, str(tmp_path / "file" / "x")], [f"{flag}={tmp_path / 'file' / 'x'}"]):
        refuses("folders", "folder-not-writable", launch(SMOKE, *words))
    metrics = launch(SMOKE, "--metrics", str(tmp_path))
    assert "must be a file" in refuses("folders", "folder-not-writable", metrics).what


def test_a_save_folder_of_two_runs(tmp_path: Path) -> None:
    save = tmp_path / "checkpoints"
    holds("folders", saving(save))
    words = ["cppmega.run", "--save", str(save)]
    other = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", *words], stdin=subprocess.PIPE
    )
    try:
        assert str(other.pid) in refuses("folders", "save-folder-in-use", saving(save)).what
    finally:
        other.communicate()


def test_a_save_folder_of_two_loops(tmp_path: Path) -> None:
    words = ["cppmega.run", "--save", str(tmp_path)]
    other = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()", *words], stdin=subprocess.PIPE
    )
    try:
        refuses("folders", "save-folder-in-use", launch(SMOKE, "--save", str(tmp_path)))
    finally:
        other.communicate()
    holds("folders", launch(SMOKE, "--save", str(tmp_path)))


def test_a_save_folder_with_the_checkpoints_of_another_run(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / TRACKER).write_text("7")
    words = ("--mock-data", "--save", str(tmp_path / "second"))
    root = patched("0.19.2")
    holds("folders", launch(SLICE, *words, root=root))
    holds("folders", launch(SLICE, *words, "--load", str(tmp_path / "second"), root=root))
    mixed = launch(SLICE, *words, "--load", str(tmp_path / "first"), root=root)
    refuses("folders", "save-folder-of-another-run", mixed)
