"""Load an optimizer's state without holding a second one on the GPU.

What: The placeholders from which `DistributedOptimizer.load_state_dict` lets Transformer Engine's
    Adam allocate its state before a checkpoint is read have the shape of the state and the memory
    of one element each. An Adam that has its state already, as it does when the checkpoint has been
    read, keeps it and loads the parameter groups alone.
Why: Megatron allocates placeholders for the whole state, and Adam keeps none of them: it allocates
    the state itself while they still exist. After the checkpoint is read, Adam is given its own
    state, and copies that as well. Each time, both fp32 moments are held twice. For a model of 5.8
    billion parameters, those are 43 GiB more: one H200 that can train it could not load it. It ran
    out of memory (139.6 GiB in use) before it had read a byte, and, with placeholders alone mended,
    after it had read everything.
Upstream: Not sent: noticed in November 2026; main (d98e8a64) and dev (d48bd6be) make the same
    placeholders
Remove: when the placeholders have no memory of their own, or are no longer made, and an optimizer
    is not given its own state.
Numerics: none (bitwise). Placeholders are unwritten memory with and without the page, and the
    checkpoint's values replace theirs. Optimizers that keep the tensors they are given (torch's,
    Apex's) get them as before; Transformer Engine's allocates and copies (read in 2.1.0, 2.11.0,
    2.19.0 and 2.20.2). Its copy of an fp32 or bf16 state had the same bits; a state in fp16 or FP8
    is no longer scaled anew, and the checkpoint's values replace it, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cppmega.edits import in_order, inserting
from cppmega.page import Edit, Patch, Source

if TYPE_CHECKING:
    from cppmega.edits import NodeEdit

TARGET = "megatron/core/optimizer/distrib_optimizer.py:DistributedOptimizer.load_state_dict"
_SMALL = inserting(
    """
    # Only an optimizer with this method allocates its state itself.
    if hasattr(self.optimizer, "set_scaled_state"):
        init_shard = lambda dtype=torch.float32: torch.empty(
            1, dtype=dtype, device=torch.cuda.current_device()
        ).expand(numel)
    """,
    after="""
    init_shard = lambda dtype=torch.float32: torch.empty(
        (numel,), dtype=dtype, device=torch.cuda.current_device()
    )
    """,
)


def _keeping(loading: str, given: str = "", unless: str = "") -> NodeEdit:
    """Let an optimizer that has its state keep it.

    Args:
        loading: the statement that loads what it is given.
        given: the statement before it that makes what it is given, if there is one.
        unless: the condition under which the state is loaded in another way.
    """
    return in_order(
        _SMALL,
        inserting(
            f"""
            # It would copy a state that it has, too.
            kept = None
            if hasattr(self.optimizer, "set_scaled_state") and self.optimizer.state{unless}:
                kept, state_dict_state = self.optimizer.state, {{}}
            """,
            before=given or loading,
        ),
        inserting(
            """
            if kept is not None:
                self.optimizer.state = kept
            """,
            after=loading,
        ),
    )


PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.15.3": "8dfff489ecadd91d",
                "0.16.1": "9c3575ef0b4fa5c2",
                "0.17.1": "9c3575ef0b4fa5c2",
                "0.18.2": "9c3575ef0b4fa5c2",
                "0.19.2": "d5fc01af38ccc951",
            },
            edit=_keeping(
                """
                self.optimizer.load_state_dict(
                    {"state": state_dict_state, "param_groups": state_dict_param_groups}
                )
                """
            ),
        ),
        Edit(
            target=TARGET,
            pins={"dev-d48bd6be": "5da945ed3577c462"},
            edit=_keeping(
                "self.optimizer.load_state_dict(optimizer_state_dict)",
                given="""
                optimizer_state_dict = {
                    "state": state_dict_state,
                    "param_groups": state_dict_param_groups,
                }
                """,
                unless=" and self._optimizer_state_offloader is None",
            ),
        ),
    ),
    reached="never",
    after=("scheduler_override_at_resume",),
)


def fixed_upstream(source: Source) -> bool:
    text = source.text(TARGET)
    return bool(text) and "init_shard" not in text and 'inner_state_dict["state"]' not in text


def verify() -> None:
    from types import SimpleNamespace
    from unittest import mock

    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    class Keeps(torch.optim.Adam):
        """An optimizer that keeps the tensors it is given."""

        def load_state_dict(self, state_dict):  # type: ignore[no-untyped-def]
            self.given = state_dict["state"]
            self.state = dict(self.given)

    class Allocates(Keeps):
        """One that, like Transformer Engine's, has a method that allocates its state."""

        def set_scaled_state(self) -> None: ...

    def loaded(kind, moments):  # type: ignore[no-untyped-def]
        """Return an optimizer of six elements after loading; `moments` are those that it has."""
        weight = torch.nn.Parameter(torch.ones(6))
        common = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False}
        common |= {"is_decoupled_lr": False, "max_lr": 1.0, "min_lr": 0.0, "step": 1}
        optimizer = DistributedOptimizer.__new__(DistributedOptimizer)
        optimizer.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
        optimizer.config = SimpleNamespace(
            optimizer="adam",
            fp16=False,
            exp_avg_dtype=torch.float32,
            exp_avg_sq_dtype=torch.bfloat16,
            use_precision_aware_optimizer_no_fp8_or_ds_fp8=False,
        )
        optimizer.grad_scaler = None
        optimizer.optimizer = kind([{"params": [weight], **common}])
        if moments:
            optimizer.optimizer.state[weight] = moments
        shard = {"gbuf_world": range(6)}
        optimizer.gbuf_ranges = [{"dtypes": [{"param_map": {weight: shard}}]}]
        optimizer.model_param_group_index_map = {weight: (0, 0)}
        with mock.patch.object(torch.cuda, "current_device", lambda: "cpu"):
            optimizer.load_state_dict({"optimizer": {"param_groups": [dict(common)]}})
        return optimizer.optimizer

    dtypes = {"exp_avg": torch.float32, "exp_avg_sq": torch.bfloat16}
    for kind, elements in ((Keeps, 6), (Allocates, 1)):
        given = loaded(kind, {}).given[0]
        for name, dtype in dtypes.items():
            one = given[name]
            assert one.shape == (6,), f"{kind.__name__}: {name} has the shape {one.shape}"
            assert one.dtype == dtype, f"{kind.__name__}: {name} is {one.dtype}"
            held = one.untyped_storage().nbytes() // one.element_size()
            assert held == elements, f"{kind.__name__}: {name} holds {held} elements of memory"

    moments = {name: torch.ones(6, dtype=dtype) for name, dtype in dtypes.items()}
    assert loaded(Keeps, moments).given, "an optimizer that keeps what it is given gets its state"
    allocates = loaded(Allocates, moments)
    assert not allocates.given, "an optimizer that has its state is given that, and copies it"
    assert [*allocates.state.values()] == [moments], "it does not have its state any more"
