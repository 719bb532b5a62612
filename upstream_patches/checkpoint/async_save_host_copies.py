"""Let the trainer copy what an asynchronous save writes, and notice a writer that has died.

What: `PersistentAsyncCaller` copies tensors to memory of the host that it shares with its process,
    which only writes them. If the process has ended before it has written, the run stops.
Why: The process maps each of the trainer's tensors on the GPU. With the 5.8 billion parameters of
    NAM56R on two H200 it failed with "CUDA driver error: out of memory" while half of the GPU was
    free, and the trainer waited for it without end (0.19.2, seen at the first save). Probably it
    was out of addresses: PyTorch reserves as many as the GPU has bytes, and an eighth more, for
    every block of expandable segments that it maps. Since 0.17, `--async-save` saves in no other
    way.
Upstream: Not sent: mcore's strategy is deprecated. The other one, of nvidia-resiliency-ext, has
    `--async-ckpt-use-cpu-shm` against a similar failure, which releases of that package up to
    0.4.1 do not know.
Remove: when mcore's strategy is removed, or copies in the trainer.
Numerics: none (bitwise)
"""

from typing import Any

from cppmega.edits import inserting
from cppmega.page import Edit, Patch, Source

CALLER = "megatron/core/dist_checkpointing/strategies/async_utils.py:PersistentAsyncCaller"
SCHEDULE = f"{CALLER}.schedule_async_call"
DONE = f"{CALLER}.is_current_async_call_done"
IMPORTS = ("from cppmega.runtime import async_save_host_copies as _cppmega_copies",)


def saves_so(args: Any) -> bool:
    """Whether the run saves in Megatron's own process for it, which lives as long as the run."""
    strategy = getattr(args, "async_strategy", "mcore")
    lives = getattr(args, "use_persistent_ckpt_worker", True)  # until 0.15, others are forked
    return bool(getattr(args, "async_save", None) and lives) and strategy == "mcore"


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=SCHEDULE,
            pins={
                "0.15.3": "2a4c08f31b63b538",
                "0.16.1": "685ac50b007e42ea",
                "0.17.1": "6f209ad52d6c7cba",
                "0.18.2": "6f209ad52d6c7cba",
                "0.19.2": "6f209ad52d6c7cba",
            },
            edit=inserting(
                "async_req = _cppmega_copies.on_host(async_req)",
                after="""
                if async_req.async_fn is None:
                    return
                """,
            ),
            imports=IMPORTS,
        ),
        Edit(
            target=DONE,
            pins={
                "0.15.3": "b17f24e8dff1d42e",
                "0.16.1": "b17f24e8dff1d42e",
                "0.17.1": "7d37936b70d770e3",
                "0.18.2": "7d37936b70d770e3",
                "0.19.2": "7d37936b70d770e3",
            },
            edit=inserting(
                "_cppmega_copies.check_alive(self)",
                before="""
                if not blocking:
                    is_alive = True
                    break
                """,
            ),
            imports=IMPORTS,
            mark="",  # it is called before the first save, too
        ),
    ),
    reached="save",
    when=saves_so,
    wanted_by=lambda recipe: recipe.async_save,
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(SCHEDULE)
    return bool(text) and "preload_q" not in text


def verify() -> None:
    import os
    from functools import partial
    from queue import Empty
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.dist_checkpointing.strategies.async_utils import (
        AsyncRequest,
        PersistentAsyncCaller,
    )
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from cppmega.errors import CppmegaError
    from cppmega.host import memory
    from cppmega.runtime import async_save_host_copies as host_copies

    pwrite = os.pwrite
    released = []

    class Queue(list):  # type: ignore[type-arg]
        """A queue whose other end does nothing."""

        put = list.append

        def cancel_join_thread(self) -> None:
            released.append(self)

        def join(self) -> None:
            assert not self, "the trainer waits for the process to copy its tensors"

        def get_nowait(self) -> None:
            raise Empty

    weight, written = torch.arange(300.0).view(20, 15), []
    tensors = [("whole", weight), ("columns", weight.t()[1:]), ("empty", weight[20:])]
    tensors += [(f"row {at}", weight[at].to(torch.float64)) for at in range(20)]  # files have two
    wanted = [tensor.clone() for _, tensor in tensors]
    buckets = [("file", "key", ([], tensors[:12])), ("other", "key", ([], tensors[12:]))]
    caller, requests, others = PersistentAsyncCaller(), Queue(), Queue()
    for name, queue in (("queue", requests), ("preload_q", others), ("comp_q", others)):
        setattr(caller, name, queue)  # before 0.17
        setattr(caller, f"_persistent_{name}", queue)
    caller.process = SimpleNamespace(is_alive=lambda: True)
    request = AsyncRequest(
        async_fn=lambda *given: written.append(given),
        async_fn_args=[0, buckets, "results"],
        finalize_fns=[],
        preload_fn=partial(FileSystemWriterAsync.preload_tensors, buckets, True),
    )
    try:
        with (
            mock.patch.object(torch.distributed, "get_rank", lambda: 0),
            mock.patch.object(host_copies, "_PART", 64),
            mock.patch.object(os, "pwrite", lambda to, data, at: pwrite(to, data[:24], at)),
        ):
            caller.schedule_async_call(request)
            assert not caller.is_current_async_call_done(blocking=False, no_dist=True)
            weight.zero_()  # the training continues
            (sent,) = requests
            assert sent.preload_fn is None, "the process copies"
            sent.async_fn(*sent.async_fn_args, **sent.async_fn_kwargs)
            ((rank, saved, results),) = written
            assert (rank, results) == (0, "results")
            assert [each[:2] for each in saved] == [("file", "key"), ("other", "key")]
            copies = [copy for _, _, (_, items) in saved for copy in items]
            for (name, _), (copied, tensor), values in zip(tensors, copies, wanted, strict=True):
                assert name == copied and tensor.equal(values), f"{name}: {tensor}"
                size = tensor.untyped_storage().nbytes()
                assert size == values.nbytes, f"{name} would be saved with {size} bytes"
            caller.process = SimpleNamespace(is_alive=lambda: False, exitcode=1)
            try:
                caller.is_current_async_call_done(blocking=False, no_dist=True)
            except CppmegaError as error:
                assert error.name == "checkpoint-writer-died", error
                assert caller.process is None, "the rank waits for it when it ends"
                assert any(queue is requests for queue in released), "it waits for its queue"
            else:
                raise AssertionError("nobody notices that the process has ended")
        copied = host_copies.on_host(request._replace(preload_fn=None))
        assert copied.async_fn_args is request.async_fn_args, "a request that copies nothing"
        with mock.patch.object(memory, "available", lambda: sum(t.nbytes for t in wanted)):
            try:
                host_copies.on_host(request)
            except CppmegaError as error:
                assert error.name == "host-limit", error
            else:
                raise AssertionError("more is copied than the host has memory for")
    finally:
        caller.process = None  # it is not to be told to end
