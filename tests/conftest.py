"""What every test process needs before its first test."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cppmega.overlay.plan import Plan
    from cppmega.page import Page
    from tests.support.lab import Lab

# A shell starts what is in its background with these ignored, and every child would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores


def _leave(worker: int) -> None:
    if os.getpid() == worker:  # no fork of it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if "PYTEST_XDIST_WORKER" in os.environ:  # whose status nobody reads
    atexit.register(_leave, os.getpid())  # called last, since to free every object takes long

# Syntax trees hold no cycles, and a collection walks through all those that the laws keep.
gc.set_threshold(500_000, 5, 20)

with contextlib.suppress(ImportError):  # a machine with GPUs may lack it
    from hypothesis import HealthCheck, settings
    from hypothesis.internal.conjecture import providers

    # It would parse all modules that are imported and draw constants from them, so that examples
    # would depend on the tests before them.
    providers._get_local_constants = lambda: providers._local_constants

    # The same examples in every run, however slow the machine is.
    calm = [HealthCheck.too_slow]
    settings.register_profile("tests", derandomize=True, deadline=None, suppress_health_check=calm)
    settings.load_profile("tests")

with contextlib.suppress(ImportError):
    from cppmega.catalogue import loader

    _SHIPPED, _load = loader.builtin_folder(), loader.load
    _pages = functools.cache(_load)

    def _shared(extra: Sequence[Path] = (), *more: Any) -> dict[str, Page]:
        """Load the shipped pages, whose files no test changes, once in a process."""
        shipped = not extra and loader.builtin_folder() == _SHIPPED
        return dict(_pages()) if shipped else _load(extra, *more)

    loader.load = _shared

with contextlib.suppress(ImportError):
    from cppmega.overlay import compute
    from cppmega.rewriting import fingerprint, rewrite
    from cppmega.tree.installed import sha256

    _slice_of, _text_of = rewrite._edit_slice, compute.rewritten
    _known: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    """What was computed, and the objects whose ids are in its key."""

    def _edit_slice(source: str, symbol: str, group: Sequence[rewrite.Step], path: str) -> str:
        """Edit the same text of a symbol once in a process: releases have most in common."""
        steps = [(s.page, id(s.edit), s.marked, s.launches, s.silent) for s in group]
        key = (source, symbol, path, *steps)
        if key not in _known:
            _known[key] = _slice_of(source, symbol, group, path), group
        text: str = _known[key][0]
        return text

    def _rewritten(plan: Plan, path: str) -> rewrite.Rewritten:
        """Compute the same text of a file once in a process, for whichever tree it is."""
        edits = plan.work[path].edits
        key = (path, sha256(plan.views[path].pristine or b""), *map(id, chain(*edits)))
        if key not in _known:
            _known[key] = _text_of(plan, path), edits
        done: rewrite.Rewritten = _known[key][0]
        return done

    fingerprint.bare = functools.cache(fingerprint.bare)
    rewrite._edit_slice, compute.rewritten = _edit_slice, _rewritten

LONGEST = (
    "test_launch.py",
    "test_megatrons_loop.py",
    "test_configurations.py",
    "test_mhc_connections.py",
    "test_laws.py",
    "test_mamba3_scan.py",
    "test_wheel.py",
    "test_process.py",
    "test_child_processes.py",
    "test_layouts.py",
    "test_script.py",
    "test_own_mixers.py",
    "test_end.py",
    "test_supervise.py",
    "test_guard.py",
    "test_smoke.py",
    "test_needed.py",
    "test_upstream_tests.py",
    "test_prepare.py",
    "test_float16_keep_fp32.py",
    "test_m2rnn.py",
    "test_optimizer_placeholders_without_memory.py",
    "test_whole_training.py",
    "test_input_embeddings.py",
    "test_commands.py",
    "test_survives.py",
    "test_optimizer_state_across_expert_parallel.py",
    "test_proof_process.py",
    "test_properties.py",
    "test_trainer.py",
    "test_arithmetic.py",
    "test_swaps.py",
    "test_kernels.py",
    "test_disk.py",
    "test_drift_releases.py",
    "test_mhc.py",
    "test_dsa_no_host_sync.py",
    "test_verify.py",
    "test_architecture.py",
    "test_linear_ce_heads.py",
    "test_kills.py",
    "test_dsa_indexer_kernels.py",
    "test_dsa_index_share_holder.py",
    "test_dsa_attention_kernels.py",
    "test_dsa_dense_loss_warmup.py",
    "test_dsa_indexer.py",
    "test_docs.py",
    "test_error_index.py",
    "test_files.py",
    "test_dsa_attention_per_head.py",
    "test_mtp_roll_packed_sequences.py",
    "test_port.py",
    "test_render.py",
    "test_live_moments.py",
    "test_ci_recipe.py",
    "test_dsa_index_share.py",
    "test_dsa_graphs.py",
    "test_mla_heads.py",
    "test_live_torch.py",
)
"""Begun first, the longest of all before the others: no process is left alone at the end."""


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, then those that import Megatron, then the others."""
    from tests.support import weekly

    items.sort(key=_place)
    weekly.mark_versions(items)
    for item in items:
        if {"configurations", "upstream_patches"} & set(item.path.parts):
            item.add_marker(pytest.mark.slow)  # models, in processes of their own


def _place(item: pytest.Item) -> int:
    name = item.path.name
    if name in LONGEST:
        return LONGEST.index(name)
    return len(LONGEST) + ("upstream_patches" not in item.path.parts)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A small tree and its pages; some modules have one of their own, which has more."""
    from tests.support.lab import Lab  # most tests need nothing of it

    return Lab(tmp_path, monkeypatch)


@pytest.hookimpl(tryfirst=True)  # before the fixtures
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let what a test draws, and its memory, not depend on those before it: no two runs share them.

    `cppmega apply`, which some call in this process, turns the collection of garbage off. Tests for
    a GPU are skipped without one.
    """
    if item.get_closest_marker("gpu") and not _has_gpu():
        pytest.skip("needs a CUDA device")
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        generator.manual_seed(0)
    gc.enable()
    if item.path not in _begun:
        # What earlier files keep, such as syntax trees, is in no later collection.
        _begun.add(item.path)
        gc.collect()
        gc.freeze()


_begun: set[Path] = set()
"""The files whose tests have begun."""


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder that all processes of this session share."""
    if "TESTS_SCRATCH" not in os.environ:
        from tests import forkserver

        folder = tempfile.mkdtemp(prefix="cppmega-tests-")
        os.environ["TESTS_SCRATCH"] = folder
        config.add_cleanup(lambda: _forget(Path(folder)))
        config.add_cleanup(forkserver.live(Path(folder)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say when a run took longer than it had to, since a kernel has changed."""
    from tests.ops import memory_record

    if "PYTEST_XDIST_WORKER" not in os.environ and (count := memory_record.unrecorded()):
        terminalreporter.line(
            f"shared memory of {count} kernels is not recorded, so that they were compiled; "
            f"run: {memory_record.COMMAND}"
        )


def _forget(folder: Path) -> None:
    del os.environ["TESTS_SCRATCH"]
    shutil.rmtree(folder, ignore_errors=True)
