"""torch's compiled forms of the proved code are no other code, and nothing else passes for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.guard.bench import Bench
from tests.support import made

pytestmark = pytest.mark.slow

NET = """\
import torch

from megatron.core.jit import jit_fuser


@jit_fuser
def fused(x):
    return x


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def plain(x: torch.Tensor) -> torch.Tensor:
    return x + 2


def breaking(x):
    torch._dynamo.graph_break()
    return x + 3


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Net(torch.nn.Module):
    @torch.no_grad()
    def norm(self, x):
        return x

    @torch.compiler.disable
    def forward(self, x):
        return plain(fused(scripted(self.norm(x))))
"""
JIT = "import torch\n\njit_fuser = torch.compile(backend='eager')\n"
WRONG = {
    "compiled_stock": "net.py:plain is torch._dynamo.eval_frame:",
    "scripted_stock": "net.py:plain is an object of type torch.jit:",
    "wraps_of_a_compiled": "net.py:plain is __main__:stock_as.<locals>.<lambda>",
    "without_gradients": "net.py:plain is torch.utils._contextlib:",
    "code_below_compile": "net.py:plain was changed in place: its code is stock",
}
FINE = (
    *("fine_function_compiled", "fine_compiled_twice", "fine_method_compiled", "fine_scripted"),
    *("fine_model_compiled", "fine_graph_break", "fine_backward", "fine_profiler"),
    *("fine_traced_by_python", "before"),
)


@pytest.fixture(scope="module", params=["torch.compile", "torch.jit.script"])
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """What the guard says, with either of the two fusers that Megatron has."""
    bench = Bench(tmp_path_factory.mktemp("torch"))
    source = "@jit_fuser\ndef fused(x):\n    return x\n"
    scripts = request.param == "torch.jit.script"  # which cannot compile a mark
    patch = 'reached="never"' if scripts else 'reached="forward"'
    made.page(bench.pages, target="megatron/core/net.py:fused", source=source, patch=patch)
    jit = "import torch\n\njit_fuser = torch.jit.script\n" if scripts else JIT
    root = bench.tree(files={"megatron/core/net.py": NET, "megatron/core/jit.py": jit})
    script = Path(__file__).parent / "torch_attacks.py"
    ((code, out, err),) = bench.run(root, script=script, PYTHONWARNINGS="ignore")
    assert code == 0, err
    assert scripts or "reached: double_doubles" in err
    found: dict[str, list[str]] = json.loads(out.partition("FOUND ")[2])
    assert found.keys() == {*WRONG, *FINE, "met"}
    return found


@pytest.mark.parametrize("scene", WRONG)
def test_what_only_looks_compiled_is_refused(found: dict[str, list[str]], scene: str) -> None:
    during, afterwards = found[scene]
    assert WRONG[scene] in during
    assert afterwards == ""


@pytest.mark.parametrize("scene", FINE)
def test_torch_raises_no_false_alarm(found: dict[str, list[str]], scene: str) -> None:
    assert found[scene] == ["", ""]
