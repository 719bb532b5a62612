"""Run the checks of several small pages in one process per version.

Importing megatron-core takes longer than all of them together. The process imports a tree with
these pages applied, and loads the unpatched files as well, so that both can be called.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from tests.support import made_once, patched, pristine, python
from tests.support.weekly import of_this_run

PAGES = {
    "absorbed_mla_gathered_weight": ("0.19.2",),
    "absorbed_mla_quantized_recompute": ("0.19.2",),
    "combined_1f1b_autocast": ("0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "delayed_wgrad_hooks": ("0.18.2", "0.19.2"),
    "dsa_indexer_prologue": ("0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "dsa_no_host_sync": ("0.19.2",),
    "embedding_gradient_rows": ("0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "fully_reshardable_bucket_padding": ("0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "fused_cross_entropy_grad_dtype": ("0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "grad_accumulation_without_apex": ("0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "grad_checks_no_host_sync": ("0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "hybrid_moe_metrics": ("0.17.1", "0.18.2", "0.19.2"),
    "hybrid_mtp_padding_mask": ("0.18.2", "0.19.2"),
    "local_graph_hidden_parameters": ("0.17.1", "0.18.2", "0.19.2"),
    "local_graph_kept_outputs": ("0.19.2",),
    "log_second_line": ("0.17.1", "0.18.2", "0.19.2"),
    "mamba_packed_seq_idx": ("0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "mla_query_key_kernel": ("0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "mla_rope_kernel": ("0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "moe_expert_bias_counts": ("0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "moe_expert_bias_padding_mask": ("0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "moe_router_graph_no_host_sync": ("0.17.1", "0.18.2", "0.19.2"),
    "mtp_loss_no_host_sync": ("0.17.1",),
    "mtp_loss_of_no_tokens": ("0.16.1",),
    "optimizer_copies_at_once": ("0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "optimizer_placeholders_without_memory": ("0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "optimizer_state_across_expert_parallel": ("0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "recompute_of_returned_input": ("0.17.1", "0.18.2", "0.19.2"),
    "recompute_rng_states": ("0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "router_gating_backward": ("0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "scheduler_override_at_resume": ("0.16.1", "0.17.1", "0.18.2", "0.19.2"),
    "te_graphs_hybrid_mtp": ("0.18.2", "0.19.2"),
    "rope_thd_no_host_sync": ("0.16.1", "0.17.1", "0.18.2", "0.19.2"),
}


def assert_passes(page: str, version: str) -> None:
    """Run `check` of the page's test module on a version."""
    result = _results(version)[page]
    assert result == "passed", result


@cache
def _results(version: str) -> dict[str, str]:
    with made_once(f"{version}-one-process.json") as (file, missing):
        if missing:
            file.write_text(_printed(version))
    results: dict[str, str] = json.loads(file.read_text())
    return results


def _printed(version: str) -> str:
    pages = [page for page, versions in PAGES.items() if version in of_this_run(versions)]
    code = f"""
    from tests.upstream_patches import one_process
    one_process.run({pages!r}, {str(pristine(version))!r})
    """
    done = python(patched(version, *pages), code)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def run(pages: list[str], stock_root: str) -> None:
    """Print the result of each page; runs in the process."""
    stock = Stock(Path(stock_root))
    results = {}
    for page in pages:
        (file,) = Path(__file__).parent.glob(f"*/test_{page}.py")
        test = importlib.import_module(f"tests.upstream_patches.{file.parent.name}.{file.stem}")
        try:
            test.check(stock)
        except Exception:
            results[page] = traceback.format_exc()
        else:
            results[page] = "passed"
    print(json.dumps(results))


class Stock:
    """Modules of the unpatched tree, which import everything else from the patched one."""

    def __init__(self, root: Path):
        self.root = root

    def module(self, name: str) -> ModuleType:
        """Return the unpatched `megatron.core.x`, loaded next to the patched one."""
        package, _, last = name.rpartition(".")
        beside = f"{package}.stock_{last}"  # in the same package, for its relative imports
        if beside not in sys.modules:
            path = self.root / (name.replace(".", "/") + ".py")
            spec = importlib.util.spec_from_file_location(beside, path)
            assert spec is not None and spec.loader is not None
            sys.modules[beside] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[beside])
        return sys.modules[beside]


@contextlib.contextmanager
def by_reference(
    op: ModuleType, function: str, reference: Callable[..., Any]
) -> Iterator[mock.Mock]:
    """Let a module of `cppmega.ops` take every call, and compute it by a reference.

    A proof takes `stand_ins.on_gpu` instead, which leaves to the real code what decides on a call.

    Args:
        op: has `obstacle`, and computes only tensors of a GPU.
        function: the name of what it computes a call by.
        reference: the same in torch.

    Yields:
        what stands for the function, and counts its calls.
    """
    with (
        mock.patch.object(importlib.import_module("torch").Tensor, "is_cuda", True),
        mock.patch.object(op, "obstacle", lambda *_: None),
        mock.patch.object(op, function, mock.Mock(wraps=reference)) as kernel,
    ):
        yield kernel
