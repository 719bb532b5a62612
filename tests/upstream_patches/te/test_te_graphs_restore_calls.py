"""Eager calls after a capture run in the precision of the run, not in that of the capture."""

from __future__ import annotations

import contextlib
import json
from typing import Any
from unittest import mock

import pytest

from tests.support import patched, pristine, python
from tests.upstream_patches.recomputation import beside_pages

torch = pytest.importorskip("torch")

PAGE = "te_graphs_restore_calls"
RELEASE = "transformer-engine==2.20.2"


@pytest.mark.parametrize("pages", [(), (PAGE,)], ids=["stock", "patched"])
def test_a_layer_is_called_as_before_its_capture(pages: tuple[str, ...]) -> None:
    root = patched(RELEASE, *pages) if pages else pristine(RELEASE)
    code = f"from tests.upstream_patches.te import test_{PAGE} as test\ntest.report()"
    done = python(root, code)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["in the capture"] == ["Layer", "MoELayer", "MoELayer"]  # its base's wrapper, too
    assert found["afterwards"] == ([] if pages else ["MoELayer"])
    assert found["a second capture"] == found["in the capture"]


def report() -> None:
    """Print whose precision the calls of a layer and of a derived one were given, and when."""
    te = beside_pages("_te_modules", "te").load("graph")
    entered: list[Any] = []

    class Layer(torch.nn.Module):
        def __call__(self, *args: Any) -> Any:
            return super().__call__(*args)

        def forward(self) -> None: ...

    class MoELayer(Layer):
        pass

    layers = (Layer(), MoELayer())

    @contextlib.contextmanager
    def autocast(*, enabled: bool, **_: Any) -> Any:
        entered.append(enabled)
        yield

    def capture(modules: Any, *_: Any, **__: Any) -> Any:
        for each in modules:
            each()
        return modules

    def calls_of(run: Any) -> list[str]:
        entered.clear()
        run()
        # The two layers ask for different precisions, which tells them apart.
        return sorted("MoELayer" if enabled else "Layer" for enabled in entered)

    def captured() -> None:
        te.make_graphed_callables(layers, (), enabled=(False, True), recipe=object())

    stand_ins = {
        "_make_graphed_callables": capture,
        "_canonicalize_capture_time_hooks": lambda *_: None,
        "save_fp8_tensors": lambda *_, **__: None,
        "restore_fp8_tensors": lambda *_: None,
        "graph_safe_rng_available": lambda: False,
        "autocast": autocast,
    }
    rng = {"get_rng_state": lambda: None, "set_rng_state": lambda _: None}
    with mock.patch.multiple(te, **stand_ins), mock.patch.multiple(torch.cuda, **rng):
        first = calls_of(captured)
        after = calls_of(lambda: [each() for each in layers])
        again = calls_of(captured)
    print(json.dumps({"in the capture": first, "afterwards": after, "a second capture": again}))
