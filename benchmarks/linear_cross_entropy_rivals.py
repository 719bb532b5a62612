"""Linear cross-entropy by cppmega and by others, for `benchmarks/linear_cross_entropy.py`."""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from cppmega.ops.linear_cross_entropy import linear_cross_entropy


@dataclass
class Case:
    """Inputs of one measurement; `mask` is 0/1, and the loss is sum(mask * loss) / sum(mask)."""

    x: Tensor
    w: Tensor
    targets: Tensor
    mask: Tensor
    counted: int
    """The number of tokens that the mask keeps, as a loader knows it on the host."""

    @staticmethod
    def random(tokens: int, hidden: int, vocabulary: int) -> Case:
        """bf16 inputs with logits of standard deviation 2."""
        generator = torch.Generator("cuda").manual_seed(tokens + vocabulary)
        options: dict[str, Any] = {"device": "cuda", "generator": generator}
        x = torch.randn(tokens, hidden, dtype=torch.bfloat16, **options)
        w = torch.randn(vocabulary, hidden, dtype=torch.bfloat16, **options) * (2 / hidden**0.5)
        targets = torch.randint(vocabulary, (tokens,), **options)
        mask = (torch.rand(tokens, **options) > 0.1).float()
        return Case(x.requires_grad_(), w.requires_grad_(), targets, mask, int(mask.sum()))

    @staticmethod
    def confident(doubt: float, tokens: int = 512, vocabulary: int = 1024) -> Case:
        """Every target has the probability `1 - doubt`, at logits around 20, exact in bf16."""
        generator = torch.Generator("cuda").manual_seed(1)
        options: dict[str, Any] = {"device": "cuda", "generator": generator}
        x = torch.randn(tokens, vocabulary, dtype=torch.float64, **options)
        targets = torch.randint(vocabulary, (tokens,), **options)
        column = targets.unsqueeze(1)
        rest = x.scatter(1, column, -torch.inf).logsumexp(1, keepdim=True)
        x.scatter_(1, column, rest + math.log((1 - doubt) / doubt))
        x += 20 - x.amax(1, keepdim=True)
        w = torch.eye(vocabulary, device="cuda", dtype=torch.bfloat16)
        mask = torch.ones(tokens, device="cuda")
        return Case(x.bfloat16().requires_grad_(), w.requires_grad_(), targets, mask, tokens)

    def of_one(self) -> Case:
        """The same numbers as new parameters, without gradients."""
        x, w = (t.detach().requires_grad_() for t in (self.x, self.w))
        return Case(x, w, self.targets, self.mask, self.counted)

    def reduce(self, per_token: Tensor) -> Tensor:
        """Reduce the loss per token as a training step does."""
        return (per_token * self.mask).sum() / self.mask.sum()


@dataclass(frozen=True)
class Rival:
    """One implementation.

    Attributes:
        name: in the table.
        loss: the scalar loss of a case.
        kernel: part of the name of a kernel that proves that it ran; None for unfused torch, whose
            proof is that none of the others' kernels ran.
        repeats: timed runs.
    """

    name: str
    loss: Callable[[Case], Tensor]
    kernel: str | None
    repeats: int = 20


def ours(leave_out: bool = False, **options: Any) -> Callable[[Case], Tensor]:
    """The scalar loss by `linear_cross_entropy` with these options.

    Args:
        leave_out: tell it how many tokens count.
        options: of `linear_cross_entropy`; the backend is one of them, and must run.
    """

    def loss(case: Case) -> Tensor:
        given = dict(options)
        if options.get("upstream") == "weighted-scalar":
            given["loss_weights"] = case.mask
        if leave_out:
            given["counted_tokens"] = case.counted
        out = linear_cross_entropy(case.x, case.w, case.targets, **given)
        named = options["backend"]
        if out.backend != named:
            raise SystemExit(f"{named} was named, but {out.backend} ran")
        return case.reduce(out.loss)

    return loss


OURS_IN_FP32 = Rival(
    "bf16 inputs, fp32 arithmetic", ours(backend="reference", upstream="weighted-scalar"), None
)


def _into_main_grad(case: Case) -> Tensor:
    weight: Any = case.w
    if not hasattr(weight, "main_grad"):
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        weight.grad_added_to_main_grad = False
    return ours(backend="triton", upstream="weighted-scalar", gradient_accumulation_fusion=True)(
        case
    )


def _torch_unfused(case: Case) -> Tensor:
    logits = torch.matmul(case.x, case.w.t())
    return case.reduce(cross_entropy(logits.float(), case.targets, reduction="none"))


def _compiled() -> Callable[[Case], Tensor]:
    @torch.compile(dynamic=False)
    def per_token(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(torch.matmul(x, w.t()).float(), targets, reduction="none")

    return lambda case: case.reduce(per_token(case.x, case.w, case.targets))


def _liger_mean(case: Case) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    targets = case.targets.masked_fill(case.mask == 0, -100)
    returned: tuple[Tensor, ...] = LigerFusedLinearCrossEntropyFunction.apply(
        case.x, case.w, targets, None, None, -100, 0.0, 0.0, "mean", None, False, torch.float32
    )
    return returned[0]


def _megatron() -> list[Rival]:
    """Megatron's own losses on materialized logits."""
    try:
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
        from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    except ImportError:
        return [Rival("stock (its arithmetic in torch)", _torch_unfused, None)]
    store = tempfile.mkdtemp()
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{store}/store", rank=0, world_size=1
    )
    group = torch.distributed.group.WORLD

    def unfused(case: Case) -> Tensor:
        logits = torch.matmul(case.x, case.w.t())
        return case.reduce(vocab_parallel_cross_entropy(logits, case.targets, tp_group=group))

    def native(case: Case) -> Tensor:
        logits = torch.matmul(case.x, case.w.t()).unsqueeze(1)
        loss = fused_vocab_parallel_cross_entropy(logits, case.targets.unsqueeze(1), group)
        return case.reduce(loss.squeeze(1))

    version = importlib.metadata.version("megatron-core")
    found = [
        Rival(f"stock (megatron-core {version})", unfused, None),
        Rival(f"native (megatron-core {version})", native, None),
    ]
    try:
        from megatron.core.extensions.transformer_engine import te_parallel_cross_entropy

        version = importlib.metadata.version("transformer-engine")
    except ImportError:
        print("transformer-engine is not installed: its row is missing", file=sys.stderr)
        return found

    def fused_by_te(case: Case) -> Tensor:
        logits = torch.matmul(case.x, case.w.t()).unsqueeze(1)
        loss = te_parallel_cross_entropy(logits, case.targets.unsqueeze(1), group)
        return case.reduce(loss.squeeze(1))

    return [*found, Rival(f"te (Transformer Engine {version})", fused_by_te, None)]


def _of_pull_3345(root: Path) -> list[Rival]:
    """The pull request's kernels; its checkout takes precedence over the release's fusions."""
    fusions = importlib.import_module("megatron.core.fusions")
    fusions.__path__.insert(0, str(root / "megatron" / "core" / "fusions"))
    call = importlib.import_module(
        "megatron.core.fusions.fused_linear_cross_entropy"
    ).linear_cross_entropy

    def mean(case: Case) -> Tensor:
        targets = case.targets.masked_fill(case.mask == 0, -100)
        found: Tensor = call(case.x, case.w, targets, reduction="mean")
        return found.squeeze()

    def none(case: Case) -> Tensor:
        return case.reduce(call(case.x, case.w, case.targets, reduction="none"))

    return [
        Rival("#3345 mean", mean, "kernel_cutlass"),
        Rival("#3345 none", none, "kernel_cutlass"),
    ]


def rivals(pull_3345: Path | None) -> list[Rival]:
    """All implementations that are installed; missing ones are reported on stderr."""
    found = [*_megatron(), Rival("torch.compile of stock", _compiled(), None)]
    if pull_3345 is not None:
        found += _of_pull_3345(pull_3345)
    for package, entries in {
        "liger-kernel": [
            Rival("Liger mean", _liger_mean, "liger_cross_entropy_kernel"),
            Rival("Liger none", ours(backend="liger"), "liger_cross_entropy_kernel"),
        ],
        "cut-cross-entropy": [Rival("CCE", ours(backend="cce"), "cce_backward_kernel", 5)],
    }.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            print(f"{package} is not installed: its rows are missing", file=sys.stderr)
            continue
        found += [
            Rival(f"{rival.name} ({version})", rival.loss, rival.kernel, rival.repeats)
            for rival in entries
        ]
    promised = ours(backend="triton", upstream="weighted-scalar")
    return [
        *found,
        Rival("ours", promised, "_row_kernel"),
        Rival(
            "ours, masked tokens left out",
            ours(leave_out=True, backend="triton", upstream="weighted-scalar"),
            "_row_kernel",
        ),
        Rival("ours, into main_grad", _into_main_grad, "_row_kernel"),
        Rival("ours, any upstream gradient", ours(backend="triton"), "_row_kernel"),
    ]
