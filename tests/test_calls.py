"""Calls that the kernels of pages compute, and calls that they decline."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from cppmega import calls
from cppmega.calls import CallDeclinedError, Count
from cppmega.errors import CppmegaError
from cppmega.host import env

torch = pytest.importorskip("torch")

WIDE = "queries are 320 wide"


@pytest.fixture(autouse=True)
def uncounted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(calls, "_SERVED", {})
    monkeypatch.setattr(calls, "_DECLINED", {})
    monkeypatch.setattr(calls, "_judge", None)
    with calls.allowing():  # restores the variable
        monkeypatch.delenv(env.ALLOW_FALLBACK.name, raising=False)
        yield


def declined() -> CallDeclinedError:
    with pytest.raises(CallDeclinedError) as caught:
        calls.served("some_kernels", WIDE, q=torch.ones(2, 320).bfloat16(), mask=None, topk=3)
    return caught.value


def test_a_declined_call_names_page_reason_shapes_and_cures() -> None:
    error: CallDeclinedError = pickle.loads(pickle.dumps(declined()))
    assert (error.name, error.page, error.reason) == ("call-declined", "some_kernels", WIDE)
    assert error.shapes == "q [2, 320] in bfloat16" and error.shapes in error.what
    variable = f"{env.ALLOW_FALLBACK.name}=some_kernels"
    for cure in ("--without some_kernels", "--allow-fallback some_kernels", variable):
        assert cure in error.next


def test_allowed_calls_are_declined_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.ALLOW_FALLBACK.name, "other_kernels")
    declined()
    with calls.allowing("some_kernels"), pytest.warns(UserWarning, match=f"some_kernels: .*{WIDE}"):
        assert not calls.served("some_kernels", WIDE)
    assert calls.allowed() == ("other_kernels",)
    declined()


def test_without_a_guard_only_training_is_refused() -> None:
    with torch.no_grad(), pytest.warns(UserWarning, match=WIDE):
        assert not calls.served("some_kernels", WIDE)

    class Declines(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: object) -> object:
            return x

        @staticmethod
        def backward(ctx: object, gradient: object) -> object:
            assert not torch.is_grad_enabled()
            calls.served("some_kernels", WIDE)
            return gradient

    with pytest.raises(CallDeclinedError):
        Declines.apply(torch.ones(1, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("promised", [True, False])
def test_a_guard_decides_by_what_the_run_promises(promised: bool) -> None:
    judged: list[str] = []
    calls.judged_by(lambda error: judged.append(error.page) or promised)  # type: ignore[func-returns-value]
    with torch.no_grad():
        if promised:
            declined()
        else:
            with pytest.warns(UserWarning, match=WIDE):
                assert not calls.served("some_kernels", WIDE)
    assert judged == ["some_kernels"]


def test_calls_of_all_ranks_are_summed_up() -> None:
    assert calls.served("b") and calls.served("a") and calls.served("a")
    calls.passed("b", WIDE)
    first = calls.counts()
    assert first == {"a": Count(2, {}), "b": Count(1, {WIDE: 1})}
    assert calls.summary([first, {"b": Count(3, {WIDE: 1})}]) == f"a 2, b 4 (2 declined: {WIDE})"
    assert calls.summary([{}]) == ""


def test_the_names_of_allowed_pages_are_checked() -> None:
    calls.allow(["some_kernels"])
    calls.check_allowed({"some_kernels": 1})
    with pytest.raises(CppmegaError, match=r"unknown-page.*Did you mean same_kernels"):
        calls.check_allowed({"same_kernels": 1})


def test_compiled_calls_are_counted_without_a_graph_break() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def kernel(x: object) -> object:
        if calls.served("some_kernels", None if x.dim() == 2 else WIDE, x=x):  # type: ignore[attr-defined]
            return x * 2  # type: ignore[operator]
        return x + 1  # type: ignore[operator]

    kernel(torch.ones(2, 2)), kernel(torch.ones(2, 2))
    with pytest.raises(Exception, match="call-declined"):
        kernel(torch.ones(2))
    with calls.allowing("some_kernels"), pytest.warns(UserWarning, match=WIDE):
        assert kernel(torch.ones(2)).tolist() == [2, 2]
    assert calls.counts()["some_kernels"].served == 1
