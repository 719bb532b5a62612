"""Asynchronous saves from copies on the host, with a real process that writes them."""

from __future__ import annotations

import io
import pickle
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import multiprocessing

from cppmega.errors import CppmegaError
from cppmega.runtime import async_save_host_copies as host_copies

_SECONDS = 120
_TYPES = (torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool)


class Request(NamedTuple):
    """What `on_host` uses of a Megatron `AsyncRequest`."""

    async_fn: Any
    async_fn_args: Any
    preload_fn: Any = None


def save(rank: int, buckets: Any, results: Any) -> None:
    """Write every bucket as Megatron does: each tensor by itself."""
    for file, _, (_, tensors) in buckets:
        saved = []
        for _, tensor in tensors:
            saved.append(io.BytesIO())
            torch.save(tensor, saved[-1])
        Path(file).write_bytes(pickle.dumps([one.getvalue() for one in saved]))
    results.put(rank)


def loop(requests: Any, results: Any) -> None:
    """Write the requests until there is none."""
    while (request := requests.get()) is not None:
        request.async_fn(*request.async_fn_args, results)


class Writer:
    """A process that is started before there is anything to write."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self.requests, self.results = context.Queue(), context.Queue()
        self.process = context.Process(target=loop, args=(self.requests, self.results), daemon=True)
        self.process.start()

    def write(self, buckets: Any) -> None:
        """Copy the buckets, and let the process write the copies."""
        request = Request(save, [3, buckets], preload_fn=partial(pytest.fail, "copied twice"))
        self.requests.put(host_copies.on_host(request))

    def wait(self) -> None:
        """Wait until it has written."""
        assert self.results.get(timeout=_SECONDS) == 3

    def end(self) -> None:
        """Let the process end."""
        self.requests.put(None)
        self.process.join(_SECONDS)
        assert self.process.exitcode == 0


def made(folder: Path, device: str, count: int) -> tuple[list[Any], list[torch.Tensor]]:
    """Two buckets, of tensors of many types and shapes, some of them views; and the tensors."""
    generator = torch.Generator(device).manual_seed(0)
    values = torch.randint(2, (count, 3, 5), generator=generator, device=device)
    tensors = [
        (values[at].to(_TYPES[at % len(_TYPES)]), f"{at}") for at in range(count)
    ]  # a block of memory for each
    whole = torch.arange(60.0, device=device).view(5, 12)
    views = [whole[1:3], whole.t(), whole[:, ::5], whole[5:], whole[2, 3]]
    views += [whole[0, 1].expand(size) for size in ((70,), (1,), (0,), (), (4, 30))]
    views += [whole[0, ::5][1:2], whole[0, ::5][:0], whole[:1, 1:2].expand(9, 1)]
    views += [whole.as_strided((9, 3), (1, 1)), whole[4].expand(1, 2, 12)]
    views += [torch._neg_view(whole[3]), torch.view_as_complex(whole.view(5, 6, 2)).conj()]
    tensors += [(view, f"view {at}") for at, view in enumerate(views)]
    buckets = [
        (str(folder / name), name, ([], [(item, tensor) for tensor, item in part]))
        for name, part in (("first", tensors[::2]), ("second", tensors[1::2]))
    ]
    ordered = [tensor for part in (tensors[::2], tensors[1::2]) for tensor, _ in part]
    return buckets, ordered


def check_saves(folder: Path, device: str, count: int) -> None:
    """Two saves, of values that the trainer overwrites before they are written."""
    writer, descriptors = Writer(), []
    for number in range(2):
        place = folder / str(number)
        place.mkdir(parents=True)
        buckets, tensors = made(place, device, count)
        wanted = [tensor.cpu().clone() for tensor in tensors]
        writer.write(buckets)
        for tensor in tensors:
            tensor.untyped_storage().fill_(0)
        writer.wait()
        read = [one for file, *_ in buckets for one in pickle.loads(Path(file).read_bytes())]
        for saved, value in zip(read, wanted, strict=True):
            found = torch.load(io.BytesIO(saved))
            assert found.dtype == value.dtype and found.equal(value)
            assert len(saved) < value.numel() * value.itemsize + 4096, "saved with its neighbours"
        descriptors.append(len(list(Path("/proc/self/fd").iterdir())))
    assert descriptors[0] == descriptors[1], "memory of the first save is kept"
    writer.end()


def test_a_save_has_the_values_of_its_moment_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copies, "_PART", 100)  # bytes, of which most tensors have more
    check_saves(tmp_path, "cpu", 50)


@pytest.mark.gpu
def test_so_it_has_from_thousands_of_blocks_of_a_gpu(tmp_path: Path) -> None:
    # A process that maps all those of a model of 5.8 billion parameters fails.
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    check_saves(tmp_path, "cuda", 3000)


def test_a_request_without_tensors_is_left_alone() -> None:
    request = Request(print, ["logits"])
    assert host_copies.on_host(request) is request


def test_copies_that_the_host_has_no_memory_for_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cppmega.host.memory.available", lambda: 1024)
    buckets = [("file", "key", ([], [("item", torch.ones(257))]))]
    request = Request(save, [0, buckets], preload_fn=print)
    with pytest.raises(CppmegaError) as refused:
        host_copies.on_host(request)
    assert refused.value.name == "host-limit"
    buckets[0] = ("file", "key", ([], [("item", torch.ones(256))]))
    assert host_copies.on_host(request).preload_fn is None


def test_nobody_waits_for_a_process_that_has_ended() -> None:
    let_go: list[str] = []
    queue = SimpleNamespace(cancel_join_thread=lambda: let_go.append("queue"))
    worker = SimpleNamespace(is_alive=lambda: True, exitcode=-9)
    caller = SimpleNamespace(process=worker, _persistent_queue=queue)
    host_copies.check_alive(caller)
    assert caller.process is worker and not let_go
    worker.is_alive = lambda: False
    with pytest.raises(CppmegaError) as refused:
        host_copies.check_alive(caller)
    assert refused.value.name == "checkpoint-writer-died"
    assert "-9" in refused.value.what
    assert caller.process is None and let_go == ["queue"]
