"""Run DSA's sparse attention in kernels that gather each query's keys once.

What: `unfused_dsa_fn` of every release and `_unfused_absorbed_dsa_fn` (since 0.19) compute the
    attention to the selected keys with `cppmega.ops.dsa_attention`, with one latent key for all
    heads or a key for each head, packed documents and context parallelism included. With the
    backend tilelang, absorbed attention uses it too, instead of TileLang's kernels; the backend
    cudnn keeps its own. A mask (Megatron builds every mask from booleans, as 0 and -inf) and
    explicit key positions become entries of -1 among the selected keys. A mask with other values
    is declined on the CPU, and fails an assertion on the GPU, where the host does not know its
    values. A call that the kernels do not support, such as one in fp32, is declined: it ends the
    run with the reason, or, with `--allow-fallback dsa_attention_kernels`, takes the same path as
    before. CPU tensors are computed by the plain reference.
Why: For the backward pass, Megatron's own paths hold fp32 scores of `[batch, heads, seq, seq]`, or
    fp32 copies of the gathered keys: with NAM56R's 32 heads of 128 and 64, sequence length 4096,
    256 keys and a batch of 4, forward and backward take 214 ms and 60.6 GiB, compared with 1.4 ms
    and 0.26 GiB; with a key per head and a batch of 1, 197 ms and 26 GiB compared with 2.5 ms and
    0.2 GiB. TileLang's kernels take 3.1, 5.0 and 6.9 ms at a batch of 1, 4 and 8, compared with
    0.75, 1.4 and 2.7 ms: they rerun the forward in the backward, compute delta from the bf16
    output, and ignore the deterministic mode. With DeepSeek-V3.2's 128 heads of 576 and 512 and
    2048 keys, the backward is 3.1 to 3.2 times as fast as theirs, the forward 1.5 times at 4096
    keys and 1.16 times at 32768 (one H200; benchmarks/results/dsa_attention_h200.md;
    dsa_attention_designs.md explains what limits it). A NAM56R slice trains 1.03 times as fast as
    with TileLang's attention (benchmarks/results/dsa_attention_slices_h200.md).
Upstream: Not sent: the kernels are those of `cppmega.ops`.
Remove: when Megatron's default path attends to the selected keys without the scores, or copies, of
    all keys.
Numerics: reorders sums; scores, softmax and delta are fp32, and products have operands of the
    inputs' dtype, with P (for the output) and dS (for dq) split into two terms of that dtype.
    Errors of the output, dq and dkv against fp64 are 1.0, 1.0 and 1.4 times those of fp32 rounded
    to bf16, also for scores with a standard deviation of 30, where TileLang's are 1.0, 4.2 and 4.0
    times and Megatron's 1.3, 1.4 and 1.6 times. The output and the gradient of the queries are
    bitwise reproducible; the gradient of absorbed keys is summed by fp32 atomics, or in a fixed
    order in torch's deterministic mode. A query that sees no key has an output of 0, as in Megatron
    since 0.19; before, it was NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cppmega.catalogue.megatron_args import uses_dsa
from cppmega.edits import inserting, replacing
from cppmega.page import Edit, Patch, Source
from cppmega.rules.combinations import FP32
from cppmega.rules.rule import Part, unsupported

if TYPE_CHECKING:
    import torch

DSA = "megatron/core/transformer/experimental_attention_variant/dsa.py"
TARGET = f"{DSA}:unfused_dsa_fn"
ABSORBED = f"{DSA}:_unfused_absorbed_dsa_fn"


def _cppmega_attends(query, key, value, mask=None):
    """Whether the kernels compute a call; where the run relies on them, they must."""
    from cppmega.calls import served
    from cppmega.ops.dsa_attention import obstacle

    reason = obstacle(query, key, value) if query.is_cuda else None  # a reference does the CPU's
    if mask is not None and not mask.is_cuda and not ((mask == 0) | mask.isneginf()).all():
        reason = "its mask has other values than 0 and -inf"
    return served("dsa_attention_kernels", reason, query=query, key=key, value=value, mask=mask)


def _cppmega_seen(indices, sk, mask=None, starts=None, ends=None, positions=None):
    """The chosen keys, -1 for those that a mask or their positions hide, and the rows' bounds."""
    from cppmega.ops.common.bounds import Bounds

    batch, sq, _ = indices.shape
    if starts is not None and (mask is not None or ends is None):
        raise ValueError("a mask beside bounds of the keys, or bounds without their ends")
    if mask is None and starts is None:
        if sq == sk:
            return indices, Bounds()
        ends = torch.arange(1, sq + 1, dtype=torch.int32, device=indices.device).clamp_max(sk)
        return indices, Bounds(torch.zeros_like(ends), ends)
    if mask is None and positions is None:
        return indices, Bounds(starts, ends)
    at = indices.clamp(0, sk - 1).long()
    if mask is not None:
        added = mask.expand(batch, sq, sk).gather(-1, at)
        seen = added == 0
        if mask.is_cuda:  # no value is read on the host
            valid = (seen | added.isneginf()).all()
            torch._assert_async(valid, "dsa_attention_kernels: a mask of other than 0 and -inf")
    else:
        at = positions[at]
        seen = (at >= starts.unsqueeze(-1)) & (at < ends.unsqueeze(-1))
    ends = torch.full((sq,), sk, dtype=torch.int32, device=indices.device)
    return indices.masked_fill(~seen, -1), Bounds(torch.zeros_like(ends), ends)


def _cppmega_asks_backend(config, query, key, v_channels):
    """Whether the backend that the run names is asked to attend, before the kernels here."""
    from cppmega.ops.dsa_attention import obstacle

    if config.dsa_kernel_backend != "tilelang":
        return True
    return query.is_cuda and obstacle(query, key, v_channels) is not None


# Up to 0.18 every row is causal from the first key on.
CAUSAL = """
def cppmega_attention():
    from cppmega.ops.dsa_attention import sparse_attention

    keys, bounds = _cppmega_seen(topk_indices, key.size(0))
    return sparse_attention(query, key, value, keys, softmax_scale, bounds=bounds).flatten(2)
if _cppmega_attends(query, key, value):
    return cppmega_attention()
"""
SEEN = "topk_indices, key.size(0), mask, varlen_starts, varlen_ends, key_positions"
PER_HEAD = f"""
def cppmega_attention():
    from cppmega.ops.dsa_attention import sparse_attention

    keys, bounds = _cppmega_seen({SEEN})
    done = sparse_attention(query, key, value, keys, softmax_scale, bounds=bounds).flatten(2)
    return done.squeeze(1) if query_was_thd else done
if _cppmega_attends(query, key, value, mask):
    return cppmega_attention()
"""
LATENT = f"""
def cppmega_attention():
    from cppmega.ops.dsa_attention import sparse_attention

    keys, bounds = _cppmega_seen({SEEN})
    done = sparse_attention(query, key, v_channels, keys, softmax_scale, bounds=bounds)
    return done.contiguous()
if _cppmega_attends(query, key, v_channels, mask):
    return cppmega_attention()
"""
FITS = 'assert key.size(-1) >= v_channels, "key last dim must contain latent value channels"'
ASKED = "dsa_kernels.use_fused_dsa_kernels(config)"
ASKS = "_cppmega_asks_backend(config, query, key, latent_v_channels)"
HELPERS = _cppmega_attends, _cppmega_seen


def _reaches(args: Any) -> bool:
    """Whether these kernels compute the attention in every call."""
    return uses_dsa(args) and getattr(args, "dsa_kernel_backend", None) != "cudnn"


def _unsupported_sizes(run: Any) -> str:
    """Sizes that the kernels do not support on a Hopper GPU; empty if they do."""
    latent, rotary = run.kv_lora_rank or 0, run.qk_pos_emb_head_dim or 0
    if "dsa_kernel_backend" not in run:  # up to 0.18, each head has a key
        wide = max((run.qk_head_dim or 0) + rotary, run.v_head_dim or 0) > 256
        return "more than 256 columns of keys or values" if wide else ""
    if max(latent, rotary) <= 128:
        return ""
    import torch  # not in the preflight of other models

    from cppmega.ops.common.device import gpu_of
    from cppmega.ops.dsa_attention import absorbed_obstacle

    heads = run.num_attention_heads // run.tensor_model_parallel_size
    gpu = gpu_of(torch.device("cpu"))
    return absorbed_obstacle(heads, latent + rotary, latent, gpu) or ""


LIMITS = Part("dsa_attention_kernels", _reaches, "cppmega revert dsa_attention_kernels")
DECLINED = "The first step would end. Megatron's path holds all scores in fp32."

PATCH = Patch(
    purpose="feature",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.16.1": "4d67a5e007e55c7f",
                "0.17.1": "4d67a5e007e55c7f",
                "0.18.2": "4d67a5e007e55c7f",
            },
            edit=inserting(CAUSAL, before="sq, b, np, hn = query.size()"),
            helpers=HELPERS,
            mark="cppmega_attention",
        ),
        Edit(
            target=ABSORBED,
            pins={
                "0.19.2": "11958cbfcd20bfd2",
                "main-d98e8a64": "11958cbfcd20bfd2",
                "dev-d48bd6be": "11958cbfcd20bfd2",
            },
            edit=inserting(LATENT, after=FITS),
            helpers=HELPERS,
            mark="cppmega_attention",
        ),
        Edit(
            target=f"{DSA}:_run_sparse_attention",
            pins={
                "0.19.2": "c9586f62ba634f7d",
                "main-d98e8a64": "c9586f62ba634f7d",
                "dev-d48bd6be": "c9586f62ba634f7d",
            },
            edit=replacing(f"if {ASKED}:", f"if {ASKED} and {ASKS}:"),
            helpers=(_cppmega_asks_backend,),
            mark="",  # a call of the backend has not passed through the patch
        ),
        Edit(
            target=TARGET,
            pins={
                "0.19.2": "82ea2c60c31cfd81",
                "main-d98e8a64": "82ea2c60c31cfd81",
                "dev-d48bd6be": "82ea2c60c31cfd81",
            },
            edit=inserting(PER_HEAD, after='value, _ = dsa_layout.ensure_sbhd(value, "value")'),
            helpers=HELPERS,
            mark="cppmega_attention",
        ),
    ),
    reached="forward",
    when=_reaches,
    asked_by=("--dsa-kernel-backend", "none"),
    feature=("megatron/core/transformer/experimental_attention_variant/dsa.py:DSAttention",),
    wanted_by=lambda recipe: recipe.uses_tilelang,
    provides={"dsa_sparse_attention": ("fused",)},
    rules=unsupported(
        LIMITS, {FP32: DECLINED, Part("{}", _unsupported_sizes, "other sizes"): DECLINED}
    ),
)


def fixed_upstream(source: Source) -> bool:
    """No path builds the scores of all keys, or copies of the gathered ones."""
    texts = [text for target in (TARGET, ABSORBED) if (text := source.text(target))]
    slow = ("torch.bmm", "torch.matmul", "index_select")
    return bool(texts) and not any(word in text for text in texts for word in slow)


def verify() -> None:
    from unittest import mock

    import torch
    from megatron.core.transformer.experimental_attention_variant import dsa

    from cppmega.ops import dsa_attention

    torch.manual_seed(0)
    query, key, value = (
        torch.randn(7, 2, 3, width, dtype=torch.float64, requires_grad=True) for width in (8, 8, 4)
    )
    chosen = torch.rand(2, 7, 7).topk(4).indices  # future keys, too: some rows see none
    chosen_by = torch.zeros(2, 7, 7, dtype=torch.bool).scatter(-1, chosen, True)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()

    def assert_dense(output, seen, key, *value):
        """Compare an output and its gradients with the softmax over the keys of `[b, sq, sk]`."""
        inputs = query, key, *value
        columns = [x.expand(-1, -1, 3, -1) for x in (key, *(value or (key[..., :4],)))]
        scores = torch.einsum("sbhd,tbhd->bhst", query, columns[0]) * 0.3
        scores = scores.masked_fill(~seen.unsqueeze(1), -1e300)  # a row without keys adds 0
        want = torch.einsum("bhst,tbhv->sbhv", scores.softmax(-1) * seen.unsqueeze(1), columns[1])
        factors = torch.randn_like(want)
        ours, theirs = (
            torch.autograd.grad((x.reshape(want.shape) * factors).sum(), inputs, retain_graph=True)
            for x in (output, want)
        )
        for mine, other in zip((output.reshape(want.shape), *ours), (want, *theirs), strict=True):
            torch.testing.assert_close(mine, other)

    served = mock.patch.object(
        dsa_attention, "sparse_attention", wraps=dsa_attention.sparse_attention
    )
    with served as op:
        output = dsa.unfused_dsa_fn(query, key, value, chosen, 0.3)
        assert output.shape == (7, 2, 12) and op.call_count == 1, "Megatron attends"
        assert_dense(output, chosen_by & causal, key, value)
        if not hasattr(dsa, "_run_sparse_attention"):  # up to 0.18
            return
        holes = chosen.masked_fill(torch.rand(2, 7, 4) < 0.3, -1)
        left = torch.zeros(2, 7, 8, dtype=torch.bool)
        left = left.scatter(-1, holes.where(holes >= 0, 7), True)[..., :7]
        starts, ends = torch.tensor([0, 0, 2, 2, 2, 5, 5]), torch.arange(1, 8)
        places = torch.tensor([6, 0, 5, 1, 4, 2, 3])
        hidden = torch.rand(2, 7, 7) < 0.3
        inside = [
            (at >= starts[:, None]) & (at < ends[:, None]) for at in (torch.arange(7), places)
        ]
        cases = (
            ({}, causal),
            ({"varlen_starts": starts, "varlen_ends": ends}, inside[0]),
            ({"varlen_starts": starts, "varlen_ends": ends, "key_positions": places}, inside[1]),
            ({"mask": torch.zeros(2, 7, 7).masked_fill(hidden, -torch.inf)}, ~hidden),
        )
        latent = torch.randn(7, 2, 1, 8, dtype=torch.float64, requires_grad=True)
        for named, seen in cases:
            output = dsa.unfused_dsa_fn(query, key, value, holes, 0.3, **named)
            assert_dense(output, left & seen, key, value)
            output = dsa._unfused_absorbed_dsa_fn(query, latent, holes, 0.3, 4, **named)
            assert output.shape == (7, 2, 3, 4), "the heads are not separate"
            assert_dense(output, left & seen, latent)
        assert op.call_count == 9, "Megatron attends"
        packed = dsa.unfused_dsa_fn(*(x[:, 0] for x in (query, key, value)), holes[:1], 0.3)
        assert packed.shape == (7, 12), "the output for a packed query has a batch dimension"
    _verify_backends(dsa)


def _verify_backends(dsa: Any) -> None:
    """Assert that TileLang is not called, and that cudnn is."""
    from types import SimpleNamespace
    from unittest import mock

    import torch

    asked = mock.patch.object(dsa.dsa_kernels, "run_fused_absorbed_sparse_attention")
    for backend, width, value, called in (
        ("tilelang", 128, 64, False),
        ("tilelang", 576, 512, False),
        ("cudnn", 128, 64, True),
        ("none", 576, 512, False),
    ):
        query, key = torch.randn(1, 1, 16, width), torch.randn(1, 1, 1, width)
        up = torch.randn(16, 2, value)
        config = SimpleNamespace(
            kv_lora_rank=value, dsa_kernel_backend=backend, attention_backend="auto"
        )
        with asked as hook:
            hook.return_value = torch.zeros(1, 1, 16, value)
            dsa._run_sparse_attention(
                absorbed_mla=True,
                query=query,
                key=key,
                value=None,
                up_v_weight=up,
                topk_indices=torch.zeros(1, 1, 64, dtype=torch.int32),
                softmax_scale=1.0,
                config=config,
                mask=None,
                varlen_starts=None,
                varlen_ends=None,
                key_positions=None,
            )
        assert hook.called == called, f"{backend} is {'not ' * called}asked at {width} and {value}"
