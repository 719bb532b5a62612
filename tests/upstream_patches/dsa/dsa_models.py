"""Small models on the CPU whose layers are DSA and MLP: a GPT of any version, a hybrid since 0.18.

Also the sets of keys that their layers use. Imported in the process that runs a tree, never by
pytest itself.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from cppmega.proof import cpu_shims
from cppmega.proof.small_models import Norm, Projection, arguments
from tests.upstream_patches.recomputation import share

LENGTH, BATCH, WORDS, TOPK = 12, 2, 32, 4
NEW = hasattr(dsa, "dsa_kernels")  # 0.19
HAS_HYBRID = importlib.util.find_spec("megatron.core.models.hybrid") is not None  # 0.18
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
ATTENTION = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
PROJECTIONS = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}


def start(**parallel: int) -> None:
    """Replace what these layers need from a GPU and a compiler."""
    cpu_shims.init_distributed(**parallel)
    mock.patch.object(dsa, "rotate_activation", lambda x: x).start()
    mock.patch.object(random, "_get_cuda_rng_state", lambda *device, **named: None).start()
    mock.patch.object(random, "_set_cuda_rng_state", lambda *state, **named: None).start()
    # Or Megatron compiles a minute of C++, whose only purpose is this.
    mock.patch.object(random, "_get_share_storage", lambda: share, create=True).start()
    multi_latent_attention.HAVE_TE = False  # 0.16 takes its own stand-ins for it
    tensor = torch.tensor
    torch.tensor = lambda *data, pin_memory=False, **named: tensor(*data, **named)
    torch.Tensor.cuda = lambda self, **named: self
    gc.freeze()  # what `left_over` need not look through


def config(**options: Any) -> Any:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    return MLATransformerConfig(
        **{
            **{"hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 16},
            **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4},
            **{"v_head_dim": 8, "add_bias_linear": False, "use_cpu_initialization": True},
            **{"experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 4},
            **{"dsa_indexer_head_dim": 8, "dsa_indexer_topk": TOPK, "dsa_indexer_loss_coeff": 0.5},
            **{"rope_type": "rope", "rotary_base": 10000, "rotary_percent": 1.0},
            **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_dropout_fusion": False},
            **{"init_method_std": 0.3, "apply_rope_fusion": False},
            # Its input has one gradient, so that sums do not depend on the order of two.
            **{"normalization": "LayerNorm"},
        }
        | options
    )


class _Backend(LocalSpecProvider):
    def linear(self) -> type:
        return ColumnParallelLinear


def _attention(settings: Any) -> Any:
    spec = variants.get_dsa_module_spec_for_backend(settings, _Backend())
    indexer = spec.submodules.core_attention.submodules.indexer
    indexer.submodules = dsa.DSAIndexerSubmodules(Projection, Projection, Norm, Projection)
    return spec


def _layer(settings: Any, mlp: bool, attention: bool = True) -> ModuleSpec:
    whole = gpt_layer_specs.get_gpt_layer_local_spec().submodules
    parts: dict[str, Any] = {}
    if attention:
        parts |= {"input_layernorm": whole.input_layernorm, "self_attn_bda": whole.self_attn_bda}
        parts["self_attention"] = _attention(settings)
    if mlp:
        parts |= {"pre_mlp_layernorm": whole.pre_mlp_layernorm, "mlp": whole.mlp}
        parts["mlp_bda"] = whole.mlp_bda
    return ModuleSpec(TransformerLayer, submodules=TransformerLayerSubmodules(**parts))


def gpt(
    layers: int = 4,
    depths: int = 0,
    here: int | None = None,
    stages: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A GPT with MTP depths, or the stage of one with `here` of its layers."""
    settings = config(num_layers=layers, mtp_num_layers=depths or None, **options)
    spec = whole = _layer(settings, mlp=True)
    if here is not None:
        norm = gpt_layer_specs.get_gpt_layer_local_spec().submodules.input_layernorm
        whole = TransformerBlockSubmodules([copy.deepcopy(spec)] * here, norm)
    heads = {}
    if depths:
        heads["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(
            settings, spec, use_transformer_engine=False
        )
    return GPTModel(transformer_layer_spec=whole, **_model(settings, stages), **heads)


def _model(settings: Any, stages: dict[str, Any] | None) -> dict[str, Any]:
    """Arguments of either kind of model, and the seed of its weights."""
    torch.manual_seed(parallel_state.get_pipeline_model_parallel_rank())
    return {
        "config": settings,
        "vocab_size": WORDS,
        "max_sequence_length": LENGTH,
        "position_embedding_type": "none",
        "share_embeddings_and_output_weights": False,
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        **(stages or {}),
    }


def hybrid(pattern: str, stages: dict[str, Any] | None = None, **options: Any) -> Any:
    """A hybrid model of the letters D and -, with MTP depths after a /."""
    from megatron.core.models.hybrid import hybrid_block as block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer import multi_token_prediction as mtp

    main, *depths = pattern.split("/")
    settings = config(
        num_layers=len(main.replace("|", "")),
        mtp_num_layers=len(depths) or None,
        is_hybrid_model=True,
        **options,
    )
    head = mtp.MultiTokenPredictionLayerSubmodules(
        enorm=WrappedNorm,
        hnorm=WrappedNorm,
        eh_proj=ColumnParallelLinear,
        mtp_model_layer=None,
        layer_norm=WrappedNorm,
    )
    heads = mtp.MultiTokenPredictionBlockSubmodules(
        layer_specs=[ModuleSpec(mtp.MultiTokenPredictionLayer, submodules=head)]
    )
    parts = block.HybridStackSubmodules(
        dsa_layer=_layer(settings, mlp=False),
        mlp_layer=_layer(settings, mlp=True, attention=False),
        mtp_block_spec=ModuleSpec(mtp.MultiTokenPredictionBlock, submodules=heads),
    )
    with mock.patch.object(block, "TENorm", WrappedNorm):
        return HybridModel(
            hybrid_stack_spec=ModuleSpec(block.HybridStack, submodules=parts),
            hybrid_layer_pattern=pattern,
            **_model(settings, stages),
        )


class WrappedNorm(torch.nn.LayerNorm):
    """A norm with the arguments of any version."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **ignored: Any) -> None:
        super().__init__(hidden_size, eps)


def batch(seed: int) -> dict[str, torch.Tensor]:
    """One microbatch."""
    tokens = torch.randint(
        WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(seed)
    )
    return {
        "input_ids": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "position_ids": torch.arange(LENGTH).expand(BATCH, LENGTH),
        "attention_mask": None,
        "loss_mask": torch.ones(BATCH, LENGTH),
    }


def loss(model: Any, seed: int = 1, mask: Any = None, packed: bool = False) -> torch.Tensor:
    """Run the forward of a microbatch; packed: of one row, which holds two documents."""
    given: dict[str, Any] = batch(seed)
    if packed:
        given = {name: rows[:1] for name, rows in given.items() if rows is not None}
        ends = torch.tensor([0, 5, LENGTH], dtype=torch.int32)
        given["packed_seq_params"] = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=LENGTH - 5,
            max_seqlen_kv=LENGTH - 5,
        )
    return model(**arguments(model, **{**given, "attention_mask": mask})).sum()


def attentions(model: Any) -> dict[str, Any]:
    """The DSA layers of a model by name."""
    found = model.named_modules()
    return {name: module for name, module in found if isinstance(module, dsa.DSAttention)}


@contextmanager
def noting_keys(note: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Pass the keys of every call of the sparse attention to a function."""
    name = "_run_sparse_attention" if NEW else "unfused_dsa_fn"
    attention = getattr(dsa, name)

    def attending(*inputs: Any, **named: Any) -> Any:
        note(named["topk_indices"] if NEW else inputs[3])
        return attention(*inputs, **named)

    with mock.patch.object(dsa, name, attending):
        yield


def gradients(model: Any) -> list[torch.Tensor]:
    """Take the gradients of all parameters off them."""
    found = [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Whether gradients are bitwise equal."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Sets:
    """Digests of the keys that each DSA layer attends to, by layer and what is being done."""

    def __init__(self) -> None:
        self.doing = ""
        self.found: dict[str, dict[str, set[str]]] = {}

    @contextmanager
    def of(self, model: Any) -> Iterator[None]:
        """Note the sets of a model's layers."""
        names = {module: name for name, module in model.named_modules()}
        run, running = dsa.DSAttention.forward, ""

        def forward(layer: Any, *inputs: Any, **named: Any) -> Any:
            nonlocal running
            running = names[layer]
            return run(layer, *inputs, **named)

        def note(keys: torch.Tensor) -> None:
            digest = hashlib.sha256(keys.long().numpy().tobytes()).hexdigest()
            self.found.setdefault(running, {}).setdefault(self.doing, set()).add(digest)

        with mock.patch.object(dsa.DSAttention, "forward", forward), noting_keys(note):
            yield

    def kept(self) -> bool | None:
        """Whether layers that were recomputed had the sets of their forward again; None: none was.

        Every layer must have had other sets for the second microbatch.
        """
        assert all(of["forward 1"] != of["forward 2"] for of in self.found.values())
        again = [of for of in self.found.values() if "backward 1" in of]
        kept = all(of[f"backward {n}"] == of[f"forward {n}"] for of in again for n in (1, 2))
        return kept if again else None


def left_over(model: Any) -> list[str]:
    """What a step leaves behind: forwards, tensors of chosen keys, holders on the configuration."""
    gc.collect()
    things = gc.get_objects()
    tensors = [x for x in things if type(x) is torch.Tensor and x.shape[1:] == (LENGTH, TOPK)]
    chosen = [x for x in tensors if not x.is_floating_point()]
    return [
        *[type(x).__name__ for x in things if type(x).__name__ == "Forward"],
        *["chosen keys" for _ in chosen],
        *[name for name in vars(model.config) if "topk_" in name and "holder" in name],
    ]
