"""Parameters and floating-point operations of a recipe, without torch.

The counts equal those of the built model, letter by letter: the tests build Megatron's own models
and compare. Floating-point operations include every layer, unlike Megatron's report for hybrid
models, which omits `D` and `+`; `megatron_flops` is that report, so that both can be shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from cppmega.recipe import Mamba2, Mamba3, Recipe

_PASSES = 3
"""Forward, gradient of the input, gradient of the weight: each is one product of the same size."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameter counts of the whole model."""

    layers: dict[str, int]
    """Letter -> parameters of all trunk layers with that letter, their norms included."""
    embedding: int
    head: int
    """0 where the head shares the embedding."""
    final_norm: int
    mtp: int
    """All MTP depths: their layers, norms and projections; they share embedding and head."""
    extras: dict[str, int] = field(default_factory=dict)
    """Embeddings in addition to the tokens': n-gram hash, structure."""
    experts: int = 0
    """Among all of the above: weights that expert parallelism distributes."""

    @property
    def trunk(self) -> int:
        """All parameters except those of MTP."""
        own = self.embedding + self.head + self.final_norm
        return sum(self.layers.values()) + own + sum(self.extras.values())

    @property
    def total(self) -> int:
        """All parameters."""
        return self.trunk + self.mtp


def parameters(recipe: Recipe) -> Parameters:
    """Count the parameters of the model, including parts that no Megatron release has."""
    layout = recipe.layout
    table = recipe.padded_vocab_size * recipe.hidden_size
    layers = {
        letter: layer_parameters(recipe, letter) * layout.trunk.count(letter)
        for letter in dict.fromkeys(layout.trunk)
    }
    if recipe.dsa_index_pattern:
        layers["D"] -= recipe.dsa_index_pattern.count("S") * indexer_parameters(recipe)
    # A depth: two input norms, the projection of their concatenation, its layers, a last norm.
    depth = 3 * recipe.hidden_size + 2 * recipe.hidden_size**2
    depth += sum(layer_parameters(recipe, letter) for letter in layout.mtp) + _contraction(recipe)
    extras = {"mhc_head": _contraction(recipe)} if recipe.uses_mhc else {}
    if recipe.ngram_hash is not None:
        ngram = recipe.ngram_hash
        width = len(ngram.tables) * ngram.dim
        extras["ngram_hash"] = sum(ngram.tables) * ngram.dim + width * recipe.hidden_size
    if recipe.structure is not None:
        own = recipe.structure
        rows = own.categories + own.levels
        scales = 2  # one per table
        extras["structure"] = (rows + recipe.hidden_size) * own.bottleneck + scales
    return Parameters(
        layers=layers,
        embedding=table,
        head=0 if recipe.tied_embeddings else table,
        final_norm=recipe.hidden_size,
        mtp=depth * layout.depths,
        extras=extras,
        experts=routed_parameters(recipe) * layout.counts()["E"],
    )


def layer_parameters(recipe: Recipe, letter: str) -> int:
    """Parameters of one layer, its input norm and hyper-connection included."""
    return _LAYERS[letter](recipe) + recipe.hidden_size + _site(recipe)


def _site(recipe: Recipe) -> int:
    """A hyper-connection: a projection of all streams, its bias, and three scales."""
    if not recipe.uses_mhc:
        return 0
    streams = recipe.mhc_num_residual_streams
    return streams * (streams + 2) * (streams * recipe.hidden_size + 1) + 3


def _contraction(recipe: Recipe) -> int:
    """A stack's or a depth's weights of the streams: a projection, its bias, and one scale."""
    if not recipe.uses_mhc:
        return 0
    streams = recipe.mhc_num_residual_streams
    return streams * (streams * recipe.hidden_size + 1) + 1


def _mlp(hidden: int, width: int, recipe: Recipe) -> int:
    return _matrices(recipe) * hidden * width


def _matrices(recipe: Recipe) -> int:
    """Weight matrices of an MLP or an expert: a gated one has a third."""
    return 3 if recipe.activation == "swiglu" else 2


def routed_parameters(recipe: Recipe) -> int:
    """Parameters of one layer's routed experts, which expert parallelism distributes."""
    if recipe.num_experts is None or recipe.moe_ffn_hidden_size is None:
        return 0
    return recipe.num_experts * _mlp(recipe.hidden_size, recipe.moe_ffn_hidden_size, recipe)


def _moe(recipe: Recipe) -> int:
    assert recipe.num_experts is not None
    router = recipe.num_experts * recipe.hidden_size  # the expert bias is a buffer
    shared = recipe.moe_shared_expert_intermediate_size or 0
    return routed_parameters(recipe) + router + _mlp(recipe.hidden_size, shared, recipe)


def _head_dim(recipe: Recipe) -> int:
    return recipe.kv_channels or recipe.hidden_size // recipe.num_attention_heads


def _attention(recipe: Recipe) -> int:
    heads, dim = recipe.num_attention_heads, _head_dim(recipe)
    groups = recipe.num_query_groups or heads
    norms = 2 * dim if recipe.qk_layernorm else 0
    return recipe.hidden_size * dim * (2 * heads + 2 * groups) + norms


def _mla(recipe: Recipe) -> int:
    return _mla_matrices(recipe) + (_mla_ranks(recipe) if recipe.qk_layernorm else 0)


def _mla_ranks(recipe: Recipe) -> int:
    """Widths of the low-rank query and key-value, which are also those of their norms."""
    return (recipe.kv_lora_rank or 0) + (recipe.q_lora_rank or 0)


def _mla_matrices(recipe: Recipe) -> int:
    heads, hidden, q_rank = recipe.num_attention_heads, recipe.hidden_size, recipe.q_lora_rank
    latent, nope, rope, value = _mla_sizes(recipe)
    query = heads * (nope + rope)
    down_and_up = hidden * query if q_rank is None else q_rank * (hidden + query)
    kv = hidden * (latent + rope) + latent * heads * (nope + value)
    return down_and_up + kv + heads * value * hidden


def _mla_sizes(recipe: Recipe) -> tuple[int, int, int, int]:
    latent, nope = recipe.kv_lora_rank, recipe.qk_head_dim
    rope, value = recipe.qk_pos_emb_head_dim, recipe.v_head_dim
    assert latent and nope and rope and value  # ensured by validate
    return latent, nope, rope, value


def _indexer_sizes(recipe: Recipe) -> tuple[int, int, int]:
    heads, dim = recipe.dsa_indexer_n_heads, recipe.dsa_indexer_head_dim
    assert heads and dim
    return heads, dim, recipe.q_lora_rank or recipe.hidden_size


def _dsa(recipe: Recipe) -> int:
    return _mla(recipe) + indexer_parameters(recipe)


def indexer_parameters(recipe: Recipe) -> int:
    """Parameters of one indexer, which a Shared DSA layer does not have."""
    _, dim, _ = _indexer_sizes(recipe)
    # The key's norm is a LayerNorm in every model: weight and bias.
    return _indexer(recipe) + 2 * dim


def _indexer(recipe: Recipe) -> int:
    """Its matrices: queries, one key, and a weight per head."""
    heads, dim, source = _indexer_sizes(recipe)
    return source * heads * dim + recipe.hidden_size * (dim + heads)


_MAMBA2_CONV, _MAMBA2_CHUNK = 4, 128
"""Tokens that Megatron's Mamba-2 convolves, and those that its kernels compute together."""


def mamba2_projected(own: Mamba2) -> int:
    """Columns of a Mamba-2 mixer's input projection: z, x, B, C and dt."""
    return 2 * own.inner + 2 * own.groups * own.state_dim + own.heads


def _mamba(recipe: Recipe) -> int:
    own = recipe.mamba2
    if own is None:
        return _mamba3(recipe)
    projections = recipe.hidden_size * (mamba2_projected(own) + own.inner)
    conv = (own.inner + 2 * own.groups * own.state_dim) * (_MAMBA2_CONV + 1)
    return projections + conv + 3 * own.heads + own.inner  # A, D and dt of a head, the gated norm


def _mamba3_widths(recipe: Recipe) -> tuple[int, int, int, int]:
    own = recipe.mamba3
    assert own is not None
    inner = own.expand * recipe.hidden_size
    heads = inner // own.head_dim
    projected = 2 * inner + 2 * own.state_dim * own.groups * own.rank + 3 * heads + own.angles
    return inner, heads, projected, own.rank * own.state_dim


def _mamba3(recipe: Recipe) -> int:
    own = recipe.mamba3
    assert own is not None
    inner, heads, projected, state = _mamba3_widths(recipe)
    hidden = recipe.hidden_size
    biases = 2 * heads * state + 2 * own.state_dim + 2 * heads  # B and C, their norms, dt and D
    mixing = 3 * inner * own.rank if own.rank > 1 else 0  # of x, z and the output
    norm = inner if own.out_norm else 0
    return hidden * projected + biases + mixing + inner * hidden + norm


def _m2rnn_widths(recipe: Recipe) -> tuple[int, int, int]:
    own = recipe.m2rnn
    assert own is not None
    heads = own.heads(recipe.hidden_size)
    return heads, heads * own.value_dim, 2 * own.key_dim + heads * own.value_dim


def _m2rnn(recipe: Recipe) -> int:
    own = recipe.m2rnn
    assert own is not None
    heads, value, conv = _m2rnn_widths(recipe)
    projection = recipe.hidden_size * (conv + heads + value)
    state = heads * own.value_dim**2 + value + 2 * heads  # transition, residual, decay and dt
    return projection + conv * (own.conv + 1) + state + value + value * recipe.hidden_size


_LAYERS: dict[str, Callable[[Recipe], int]] = {
    "D": _dsa,
    "+": _mla,
    "*": _attention,
    "E": _moe,
    "-": lambda recipe: _mlp(recipe.hidden_size, recipe.ffn_hidden_size, recipe),
    "M": _mamba,
    "R": _m2rnn,
}


def flops(recipe: Recipe, squares: float | None = None) -> float:
    """Floating-point operations of one token, forward and backward, every layer counted.

    Only matrix products count. Recomputation does not; sparse attention counts the keys that it
    attends to, and its indexer all keys.

    Args:
        recipe: the run.
        squares: mean over tokens of the length of the token's document, where packed documents
            only attend to themselves; default: the sequence length.
    """
    keys = (squares or recipe.seq_length) / 2  # causal: half of them on average
    layout = recipe.layout
    total = sum(count * _work(recipe, letter, keys) for letter, count in layout.counts().items())
    total += recipe.indexers * _indexer_work(recipe, keys) if recipe.uses_dsa else 0
    products = layout.depths * 2 * recipe.hidden_size**2
    products += (1 + layout.depths) * recipe.hidden_size * recipe.padded_vocab_size
    if recipe.uses_mhc:
        products += _products_of_streams(recipe)
    # One product for all columns; every depth embeds its tokens again.
    products += (1 + layout.depths) * _embedded_columns(recipe) * recipe.hidden_size
    return total + _PASSES * 2 * products


def _embedded_columns(recipe: Recipe) -> int:
    """Columns of which the embeddings added to a token are a product."""
    ngram, structure = recipe.ngram_hash, recipe.structure
    columns = 0 if ngram is None else len(ngram.tables) * ngram.dim
    return columns + (0 if structure is None else structure.categories + structure.levels)


def _products_of_streams(recipe: Recipe) -> int:
    """Products of all sites and contractions, and of further streams in the MTP projections."""
    layout, streams = recipe.layout, recipe.mhc_num_residual_streams
    all_streams = streams * recipe.hidden_size
    # Projection and mixing; the weighted sums of a site's input and output are not matrix products.
    site = all_streams * (streams * (streams + 2) + streams)
    contraction = all_streams * streams
    further = layout.depths * (streams - 1) * recipe.hidden_size**2
    return sum(layout.counts().values()) * site + (1 + layout.depths) * contraction + further


def _work(recipe: Recipe, letter: str, keys: float) -> float:
    """Operations of one token in one layer, forward and backward."""
    heads = recipe.num_attention_heads
    if letter == "E":
        assert recipe.num_experts is not None
        idle = routed_parameters(recipe) * (1 - recipe.moe_router_topk / recipe.num_experts)
        return _PASSES * 2 * (_moe(recipe) - idle)
    if letter == "*":
        groups, dim = recipe.num_query_groups or heads, _head_dim(recipe)
        weights = recipe.hidden_size * dim * (2 * heads + 2 * groups)
        return _PASSES * 2 * (weights + keys * heads * 2 * dim)
    if letter == "+":
        _, nope, rope, value = _mla_sizes(recipe)
        return _PASSES * 2 * (_mla_matrices(recipe) + keys * heads * (nope + rope + value))
    if letter == "D":
        return _dsa_work(recipe, keys)
    if letter == "M" and recipe.mamba2 is not None:
        own = recipe.mamba2
        weights = recipe.hidden_size * (mamba2_projected(own) + own.inner)
        return _PASSES * 2 * (weights + own.inner * (2 * own.state_dim + _MAMBA2_CHUNK))
    if letter == "M":
        assert recipe.mamba3 is not None
        inner, _, projected, state = _mamba3_widths(recipe)
        # Per chunk: scores and their product with x, and the state in and out, at every rank.
        chunk = recipe.mamba3.chunk * recipe.mamba3.rank
        weights = recipe.hidden_size * (projected + inner)
        return _PASSES * 2 * (weights + inner * (2 * state + chunk))
    if letter == "R":
        assert recipe.m2rnn is not None
        state = recipe.m2rnn.key_dim * (recipe.m2rnn.value_dim + 2)
        recurrent, value, conv = _m2rnn_widths(recipe)
        weights = recipe.hidden_size * (conv + recurrent + 2 * value) + conv * recipe.m2rnn.conv
        return _PASSES * 2 * (weights + value * state)
    return _PASSES * 2 * _mlp(recipe.hidden_size, recipe.ffn_hidden_size, recipe)


def _dsa_work(recipe: Recipe, keys: float) -> float:
    """Attention in the latent space over the top-k; its indexer counts by itself."""
    latent, _, rope, _ = _mla_sizes(recipe)
    attention = _chosen(recipe, keys) * recipe.num_attention_heads * (2 * latent + rope)
    return _PASSES * 2 * (_mla_matrices(recipe) + attention)


def _chosen(recipe: Recipe, keys: float) -> float:
    assert recipe.dsa_indexer_topk is not None
    topk = float(recipe.dsa_indexer_topk)
    # The first top-k tokens of a document have fewer keys than that.
    return keys if 2 * keys <= topk else topk - topk**2 / (4 * keys)


def _indexer_work(recipe: Recipe, keys: float) -> float:
    """An indexer's scores over all keys, and its backward pass if it has a loss.

    No gradient flows into its inputs, and with the sparse loss the backward pass covers only the
    top-k.
    """
    heads, dim, _ = _indexer_sizes(recipe)
    indexer = _indexer(recipe) + keys * heads * dim
    if recipe.dsa_indexer_loss_coeff:
        seen = _chosen(recipe, keys) if recipe.dsa_indexer_use_sparse_loss else keys
        indexer += _indexer(recipe) + 2 * seen * heads * dim
    return 2 * indexer


def megatron_flops(recipe: Recipe, letters: str = "") -> float:
    """Floating-point operations of one token as stock Megatron reports them.

    Its formula for hybrid models counts *, - and E, Mamba-3 as Mamba-2, and nothing for D, + and R.
    Its formula for GPT models counts DSA as dense MLA, without the indexer.

    Args:
        recipe: the run.
        letters: the layers to count; "": those of the recipe.
    """
    counts = Counter(letters or recipe.layout.letters)
    layout = recipe.layout
    hidden, keys = recipe.hidden_size, recipe.seq_length / 2
    gate = _matrices(recipe) / 2
    shared = recipe.moe_shared_expert_intermediate_size or 0
    expert = (recipe.moe_ffn_hidden_size or 0) * recipe.moe_router_topk + shared
    forward = 4 * gate * hidden * (counts["-"] * recipe.ffn_hidden_size + counts["E"] * expert)
    forward += (1 + layout.depths) * 2 * hidden * recipe.padded_vocab_size
    if recipe.kind != "hybrid":
        # Norms count as products here: two of MLA's ranks, three of every MTP depth.
        forward += layout.depths * 2 * (3 * hidden + 2 * hidden**2)
        if recipe.attention != "full":
            return _PASSES * (forward + (counts["+"] + counts["D"]) * _megatron_mla(recipe, keys))
    forward += counts["M"] * _megatron_mamba(recipe) if counts["M"] else 0
    return _PASSES * (forward + counts["*"] * _megatron_attention(recipe, keys))


def _megatron_mamba(recipe: Recipe) -> float:
    hidden, own = recipe.hidden_size, recipe.mamba2 or recipe.mamba3 or Mamba3()
    heads = own.heads if isinstance(own, Mamba2) else own.heads(hidden)
    inner = 2 * hidden  # whatever the recipe's sizes are
    projected = 2 * inner + 2 * own.groups * own.state_dim + heads
    return 2 * hidden * (projected + inner) + 7 * inner * own.state_dim


def _megatron_mla(recipe: Recipe, keys: float) -> float:
    _, nope, rope, value = _mla_sizes(recipe)
    weights = _mla_matrices(recipe) + _mla_ranks(recipe)  # norms count even where there are none
    return 2 * weights + 2 * keys * recipe.num_attention_heads * (nope + rope + value)


def _megatron_attention(recipe: Recipe, keys: float) -> float:
    heads = recipe.num_attention_heads
    groups, dim = recipe.num_query_groups or heads, _head_dim(recipe)
    return 2 * recipe.hidden_size * dim * (2 * heads + 2 * groups) + 4 * keys * heads * dim
