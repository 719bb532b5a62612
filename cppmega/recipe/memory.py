"""Estimate the GPU memory of a recipe's fullest rank, and count its checkpoint, without torch.

Weights, gradients and optimizer states are exact sums; activations are estimated by a model of what
Megatron keeps for the backward pass. Near the limit, only a trial run can tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cppmega.host import env
from cppmega.recipe import Recipe, pipeline
from cppmega.recipe.arithmetic import (
    indexer_parameters,
    layer_parameters,
    mamba2_projected,
    parameters,
    routed_parameters,
)
from cppmega.recipe.layer_pattern import OWN
from cppmega.sizes.dsa_widths import Widths, supported

GIB = 2**30
_CONTEXT = 2 * GIB
"""CUDA context, cuBLAS and cuDNN workspaces, NCCL buffers."""
_CHUNK = GIB
"""`LOGITS_BYTES` of `cppmega.ops.linear_cross_entropy.chunks`, which imports torch; the logits of
fewer tokens take less."""
_UNFUSED_SCORES = 3
"""Full fp32 score tensors that unfused DSA keeps per layer: scores, softmax, and the mask or its
product."""


MAMBA_RECOMPUTE = ("CPPMEGA_MAMBA_RECOMPUTE", "1")
"""The gate of the page mamba_layer_recompute, which keeps only a layer's input."""
KEY_PER_HEAD = (env.DSA_KEY_PER_HEAD.name, "1")
"""The gate of the page dsa_key_per_head: DSA keeps keys and values as wide as MLA's."""
FP8_EXPERTS = ("CPPMEGA_SELECTIVE_FP8_MOE", "1")
"""The gate of the page selective_fp8_moe: only products of routed experts are in FP8."""
_FP8_COPIES = 2
"""Bytes per weight whose products are in FP8: Transformer Engine keeps it and its transpose so, in
addition to the bf16 weight."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes on the fullest rank."""

    states: int
    """Weights, gradients and optimizer states."""
    activations: int
    """Kept for the backward passes that wait, with those of one recomputed layer while it runs."""
    logits: int
    """Kept for the losses of trunk and MTP depths: logits and their fp32 copy, or gradients."""

    @property
    def total(self) -> int:
        """The sum, including the fixed cost of a process."""
        return self.states + self.activations + self.logits + _CONTEXT

    @property
    def gib(self) -> float:
        """The total in GiB."""
        return self.total / GIB


def checkpoint_bytes(recipe: Recipe, optimizer: bool = True) -> int:
    """Bytes of a checkpoint, all ranks together.

    Args:
        recipe: the run.
        optimizer: with fp32 weights and two moments in addition to the weights of the model.
    """
    weight = 4 if recipe.kind == "loop" else 2
    states = 8 if recipe.kind == "loop" else 12  # a loop's weights are fp32 themselves
    return (weight + states * optimizer) * parameters(recipe).total


def estimate(recipe: Recipe, widened: Iterable[Widths] = (), attends: bool = False) -> Estimate:
    """Estimate the fullest rank of a run on GPUs.

    Args:
        recipe: the run.
        widened: widths of DSA that pages provide beyond those of the release.
        attends: a page provides DSA's attention at any widths; the backend cudnn has its own.
    """
    fused = recipe.dsa_widths in supported(recipe.dsa_kernel_backend, widened)
    fused |= attends and recipe.dsa_kernel_backend != "cudnn"
    ranks = range(recipe.pipeline_model_parallel_size)
    return max((_of_rank(recipe, rank, fused) for rank in ranks), key=lambda one: one.total)


def _of_rank(recipe: Recipe, rank: int, fused: bool) -> Estimate:
    is_last = rank == recipe.pipeline_model_parallel_size - 1
    logits = _logits(recipe) if is_last else 0
    # A block is recomputed once the backward pass has left the losses.
    again = max(_recomputed_streams(recipe, rank) - logits, 0)
    return Estimate(_states(recipe, rank), _activations(recipe, rank, fused) + again, logits)


def _stages(recipe: Recipe, rank: int) -> list[tuple[str, int]]:
    """The letters of every stage of a rank, and how many of its DSA layers share keys."""
    stages, seen = [], 0
    for letters in recipe.layers_by_stage:
        until = seen + letters.count("D")
        stages.append((letters, recipe.dsa_index_pattern[seen:until].count("S")))
        seen = until
    return stages[rank :: recipe.pipeline_model_parallel_size]


def _states(recipe: Recipe, rank: int) -> int:
    counts, layout = parameters(recipe), recipe.layout
    tensor, pipes = recipe.tensor_model_parallel_size, recipe.pipeline_model_parallel_size
    is_first, is_last = rank == 0, rank == pipes - 1
    stages = _stages(recipe, rank)
    letters = "".join(part for part, _ in stages) + layout.mtp * layout.depths * is_last
    routed = routed_parameters(recipe) * letters.count("E")
    body = sum(layer_parameters(recipe, letter) for part, _ in stages for letter in part)
    if shared := sum(number for _, number in stages):
        body -= shared * indexer_parameters(recipe)
    # The last rank also has the embedding, for the MTP depths or because its head is tied to it.
    embeds_again = is_last and bool(layout.depths)
    tokens = counts.embedding * (is_first or embeds_again or (is_last and recipe.tied_embeddings))
    ends = tokens + (counts.head + counts.final_norm + counts.mtp) * is_last
    contraction = counts.extras.get("mhc_head", 0)
    everywhere = (sum(counts.extras.values()) - contraction) * (is_first or embeds_again)
    everywhere += contraction * is_last
    quantized = (body + counts.mtp * is_last - routed) // tensor
    copies = _fp8_copies(recipe, quantized, routed)
    return _bytes(recipe, (body + ends - routed) // tensor + everywhere, routed) + copies


def _bytes(recipe: Recipe, dense: int, routed: int) -> int:
    """Bytes of a rank's parameters and of what training adds to them."""
    replicas = recipe.data_parallel_size * recipe.context_parallel_size
    spread = _spread(recipe, routed)
    if recipe.kind == "loop":
        return (dense + spread) * 16  # fp32 weight, gradient and Adam's two moments
    # A bf16 weight and an fp32 gradient; an fp32 weight and two moments, sharded over the replicas.
    shard = replicas if recipe.use_distributed_optimizer else 1
    copies = max(replicas // recipe.expert_model_parallel_size, 1)
    expert_shard = copies if recipe.use_distributed_optimizer else 1
    return dense * 6 + dense * 12 // shard + spread * 6 + spread * 12 // expert_shard


def _spread(recipe: Recipe, routed: int) -> int:
    """A rank's share of the routed experts, which EP spreads and TP splits (Megatron's default)."""
    return routed // (recipe.expert_model_parallel_size * recipe.tensor_model_parallel_size)


def _fp8_copies(recipe: Recipe, dense: int, routed: int) -> int:
    """Bytes of the copies in FP8 of a rank's weights, which are kept from step to step."""
    own = dense * _in_fp8(recipe) + _spread(recipe, routed) * _in_fp8(recipe, routed=True)
    return _FP8_COPIES * own


def _in_fp8(recipe: Recipe, routed: bool = False) -> bool:
    """Whether the products of layers, or those of routed experts, are in FP8."""
    return recipe.precision == "fp8" and (routed or FP8_EXPERTS not in recipe.gates)


def _saved(recipe: Recipe, routed: bool = False) -> int:
    """Bytes of a value that is only kept as the input of such a product."""
    return 1 if _in_fp8(recipe, routed) else 2


def _activations(recipe: Recipe, rank: int, fused: bool) -> int:
    tokens, layout = _tokens(recipe), recipe.layout
    kept = {letter: _kept(recipe, letter, tokens, fused) for letter in set(layout.letters)}
    stages = []
    for number, (letters, shared) in enumerate(_stages(recipe, rank)):
        begins = rank == number == 0
        stage = sum(kept[letter] for letter in letters)
        stage += _blocks(recipe, len(letters), tokens, begins)
        stages.append(stage - shared * _indexer_scores(recipe, tokens, fused))
    if rank == recipe.pipeline_model_parallel_size - 1:
        joined = 10 * _own_tokens(recipe, tokens) * recipe.hidden_size
        depth = sum(kept[letter] for letter in layout.mtp) + joined
        stages[-1] += depth * layout.depths
    mixtures = pipeline.under_way(recipe, rank)
    most = max(sum(stages[n] * passes for n, passes in each.items()) for each in mixtures)
    others = tuple(gate for gate in recipe.gates if gate != MAMBA_RECOMPUTE)
    plain = recipe.with_(recompute_modules=(), gates=others)
    again = (_kept(plain, letter, tokens, fused) - kept[letter] for letter in kept)
    passing = _passing_scores(recipe, tokens) if "D" in kept and not fused else 0
    return most + max(*again, passing)


def _tokens(recipe: Recipe) -> int:
    """Tokens of a micro-batch on one rank."""
    return recipe.micro_batch_size * recipe.seq_length // recipe.context_parallel_size


def _own_tokens(recipe: Recipe, tokens: int) -> int:
    """Tokens whose stream a rank keeps: with TP, recipes run with sequence parallelism."""
    return tokens // recipe.tensor_model_parallel_size


def _kept(recipe: Recipe, letter: str, tokens: int, fused: bool) -> int:
    """Bytes that one layer keeps, in bf16 or as inputs of products in FP8.

    Args:
        fused: DSA runs in a fused kernel.
    """
    hidden, tensor = recipe.hidden_size, recipe.tensor_model_parallel_size
    saved, site = _saved(recipe), _kept_by_site(recipe, tokens)
    # The layer's input and its normalised copy, and what its hyper-connection keeps. Routers and
    # MLA read that copy in bf16.
    stream = (2 + (2 if letter in "ED+" else saved)) * _own_tokens(recipe, tokens) * hidden + site
    if letter == "-":
        mlp = _kept_by_mlp(recipe, recipe.ffn_hidden_size, "mlp", saved)
        return stream + mlp * tokens // tensor
    if letter == "E" and "moe" in recipe.recompute_modules:
        return stream
    if letter == "E":
        width, topk = recipe.moe_ffn_hidden_size, recipe.moe_router_topk
        of_routed = _saved(recipe, routed=True)
        # What the experts read; what they return is only summed, which keeps nothing.
        read = topk * hidden * of_routed
        read += hidden * _in_fp8(recipe)  # by the shared expert, in addition to the router
        routed = _kept_by_mlp(recipe, topk * (width or 0), "moe_act", of_routed)
        shared = _kept_by_mlp(
            recipe, recipe.moe_shared_expert_intermediate_size or 0, "moe_act", saved
        )
        return stream + tokens * read + tokens * (routed + shared) // tensor
    heads = recipe.num_attention_heads // tensor
    if letter in "D+":
        assert recipe.kv_lora_rank and recipe.qk_head_dim and recipe.v_head_dim
        rope = recipe.qk_pos_emb_head_dim or 0
        query, value = recipe.qk_head_dim + rope, recipe.v_head_dim
        rest = 0
        if letter == "D" and KEY_PER_HEAD in recipe.gates:
            rest = value  # what rounding took from the output
        elif letter == "D":
            query, value = recipe.kv_lora_rank + rope, recipe.kv_lora_rank
        inputs = 0 if "mla_up_proj" in recipe.recompute_modules else 2 * query + value
        kept = 2 * tokens * heads * (inputs + value + rest + recipe.v_head_dim)
        scores = _dsa_scores(recipe, tokens, heads, fused) if letter == "D" else 0
        return stream + kept + scores
    if letter == "*":
        dim = recipe.kv_channels or hidden // recipe.num_attention_heads
        return stream + 2 * tokens * heads * dim * 4
    if letter in OWN and MAMBA_RECOMPUTE in recipe.gates:
        return stream
    if letter == "M" and recipe.mamba2 is not None:
        # Its projection, and the inner width after the scan, after the gated norm, and gated.
        kept = 2 * mamba2_projected(recipe.mamba2) + (4 + saved) * recipe.mamba2.inner
        return stream + tokens * kept // tensor
    if letter == "M":
        return stream + tokens * _kept_by_mamba3(recipe) // tensor
    # M2RNN: projections of about the inner width, and states at chunk borders.
    return stream + 2 * tokens * hidden * 8 // tensor


def _kept_by_mamba3(recipe: Recipe) -> int:
    """Bytes per token: projection and output; without the lean MIMO also what they produce."""
    own = recipe.mamba3
    assert own is not None
    heads = own.heads(recipe.hidden_size)
    inner, states = heads * own.head_dim, own.groups * own.rank * own.state_dim
    projected = 2 * inner + 2 * states + 3 * heads + own.angles
    kept = 2 * projected + _saved(recipe) * inner
    if own.rank > 1 and not own.out_norm:
        return kept
    # Keys and queries as the scan reads them, copies of x and z, and the angles of every head in
    # fp32, before and after their cumulative sum.
    return kept + 2 * (2 * states + 2 * inner) + 2 * 4 * heads * own.angles


def _kept_by_site(recipe: Recipe, tokens: int) -> int:
    """The streams and the sub-layer's output; recomputed: the output in place of the input.

    The plain implementation keeps the output in fp32, and the streams three times: for the weights
    of the site, for the sub-layer's input, and for the streams after it.
    """
    if not recipe.uses_mhc or _recomputes_streams(recipe):
        return 0
    streams = _streams(recipe, tokens)
    output = 2 * _own_tokens(recipe, tokens) * recipe.hidden_size
    return streams + output if recipe.use_fused_mhc else 2 * (3 * streams + output)


def _recomputes_streams(recipe: Recipe) -> bool:
    return recipe.uses_mhc and "mhc" in recipe.recompute_modules


def _blocks(recipe: Recipe, letters: int, tokens: int, begins: bool) -> int:
    """The input streams of blocks of recomputed layers.

    Those at the start of a model are recomputed from one hidden state, which any model keeps.
    """
    if not _recomputes_streams(recipe):
        return 0
    blocks = -(-letters // _sites(recipe, letters))
    return (blocks - begins) * _streams(recipe, tokens)


def _recomputed_streams(recipe: Recipe, rank: int) -> int:
    """The streams of one block, all of which its backward pass computes before it begins."""
    if not _recomputes_streams(recipe):
        return 0
    tokens = _tokens(recipe)
    sites = max(_sites(recipe, len(letters)) for letters, _ in _stages(recipe, rank))
    return sites * _streams(recipe, tokens)


def _sites(recipe: Recipe, letters: int) -> int:
    """Sites of a block of recomputed layers; a GPT's layer has two letters, and two sites."""
    of_layer = 1 if recipe.kind == "hybrid" else 2
    return min(of_layer * (recipe.mhc_recompute_layer_num or letters), letters)


def _streams(recipe: Recipe, tokens: int) -> int:
    streams = recipe.mhc_num_residual_streams
    return 2 * _own_tokens(recipe, tokens) * recipe.hidden_size * streams


def _kept_by_mlp(recipe: Recipe, width: int, module: str, saved: int) -> int:
    """Bytes per token: before and after the activation, unless one is recomputed."""
    if module == "mlp" and "mlp" in recipe.recompute_modules:
        return 0
    gate = 2 if recipe.activation == "swiglu" else 1
    after = 0 if module in recipe.recompute_modules else saved
    return width * (2 * gate + after)


def _dsa_scores(recipe: Recipe, tokens: int, heads: int, fused: bool) -> int:
    """Score tensors of sparse attention and of its indexer's loss."""
    pairs = tokens * recipe.seq_length
    unkept = fused or _recomputes_attention(recipe)
    attention = 0 if unkept else 4 * pairs * heads * _UNFUSED_SCORES
    return attention + _indexer_scores(recipe, tokens, fused)


def _passing_scores(recipe: Recipe, tokens: int) -> int:
    """Bytes by which an unfused indexer exceeds the attention of its layer, which comes later.

    It has the scores of all its heads, which TP does not split, before and after their ReLU.
    """
    heads = recipe.num_attention_heads // recipe.tensor_model_parallel_size
    surplus = 2 * (recipe.dsa_indexer_n_heads or 0) - _UNFUSED_SCORES * heads
    return max(4 * tokens * recipe.seq_length * surplus, 0)


def _indexer_scores(recipe: Recipe, tokens: int, fused: bool) -> int:
    """Bytes that the loss of one indexer keeps."""
    if not recipe.dsa_indexer_loss_coeff or _recomputes_attention(recipe):
        return 0
    return 4 * tokens * recipe.seq_length * (1 if fused else 2)


def _recomputes_attention(recipe: Recipe) -> bool:
    return "core_attn" in recipe.recompute_modules


def _logits(recipe: Recipe) -> int:
    tokens = _tokens(recipe)
    rows = recipe.padded_vocab_size // recipe.tensor_model_parallel_size
    heads = 1 + recipe.layout.depths
    if recipe.uses_linear_cross_entropy:
        if recipe.gradient_accumulation_fusion and tokens <= 2 * recipe.hidden_size:
            return 2 * heads * tokens * rows  # bf16 logits wait, and dW goes to main_grad
        # One chunk of logits; each head's dW in fp32 and dX in bf16 wait for the backward pass.
        return min(_CHUNK, 2 * tokens * rows) + heads * recipe.hidden_size * (4 * rows + 2 * tokens)
    # bf16 logits; the softmax in fp32 is kept for the backward pass, once per head.
    return tokens * rows * (2 + 4) * heads
