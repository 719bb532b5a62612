"""Real GPT and hybrid models with DSA layers on the CPU, and the sets that their layers use.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import absorbed_mla, dsa
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from cppmega.proof.small_models import Norm, Projection
from tests.configurations import stand_ins

LENGTH, VOCABULARY, WIDTH, TOPK = 12, 32, 16, 4
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
ATTENTION = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


def start() -> None:
    """Replace what these models need from a GPU."""
    stand_ins.install()
    mock.patch.object(dsa, "rotate_activation", lambda x: x).start()
    tensor = torch.tensor
    torch.tensor = lambda *data, pin_memory=False, **named: tensor(*data, **named)
    torch.Tensor.cuda = lambda self, **named: self
    gc.freeze()  # what `left_over` need not look through


def configured(**options: Any) -> MLATransformerConfig:
    """A configuration of DSA layers."""
    given = {
        **{"num_layers": 4, "hidden_size": WIDTH, "ffn_hidden_size": WIDTH},
        **{"num_attention_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 8},
        **{"qk_pos_emb_head_dim": 4, "v_head_dim": 8, "add_bias_linear": False},
        **{"rope_type": "rope", "rotary_base": 10000, "rotary_percent": 1.0},
        **{"experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 4},
        **{"dsa_indexer_head_dim": 8, "dsa_indexer_topk": TOPK, "dsa_indexer_loss_coeff": 0.5},
        **{"dsa_indexer_topk_freq": 2, "dsa_indexer_skip_topk_offset": 0},
        **{"use_cpu_initialization": True, "bias_dropout_fusion": False, "hidden_dropout": 0.0},
        **{"attention_dropout": 0.0, "init_method_std": 0.3, "apply_rope_fusion": False},
    }
    return MLATransformerConfig(**{**given, **options})


def attention() -> ModuleSpec:
    """Absorbed latent attention over the keys that an indexer chooses."""
    parts = dsa.DSAIndexerSubmodules(Projection, Projection, Norm, Projection)
    chosen = dsa.DSAttentionSubmodules(ModuleSpec(dsa.DSAIndexer, submodules=parts))
    return ModuleSpec(
        absorbed_mla.AbsorbedMLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=absorbed_mla.AbsorbedMLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=ModuleSpec(dsa.DSAttention, submodules=chosen),
            linear_proj=RowParallelLinear,
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        ),
    )


def _layer() -> ModuleSpec:
    return ModuleSpec(
        TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=stand_ins.Norm,
            self_attention=attention(),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=stand_ins.Norm,
            mlp=gpt_layer_specs.get_gpt_layer_local_spec().submodules.mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _model(config: MLATransformerConfig, **given: Any) -> dict[str, Any]:
    torch.manual_seed(parallel_state.get_pipeline_model_parallel_rank())
    return {
        "config": config,
        "vocab_size": VOCABULARY,
        "max_sequence_length": LENGTH,
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        "share_embeddings_and_output_weights": False,
        "position_embedding_type": "none",
        **given,
    }


def gpt(depths: int = 0, **options: Any) -> Any:
    """A GPT model of DSA layers; layers 1 and 3 are Full."""
    config = configured(mtp_num_layers=depths or None, **options)
    heads = {}
    if depths:
        heads["mtp_block_spec"] = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, _layer(), use_transformer_engine=False
        )
    return GPTModel(transformer_layer_spec=_layer(), **_model(config, **heads))


def hybrid(pattern: str = "D-DD-D", depths: int = 0, **options: Any) -> Any:
    """A hybrid model of DSA and MLP layers."""
    config = configured(
        num_layers=len(pattern.replace("|", "")), mtp_num_layers=depths or None, **options
    )
    whole = "/".join([pattern, *["DD"] * depths])
    return HybridModel(**_model(config, hybrid_stack_spec=_stack(), hybrid_layer_pattern=whole))


def _stack() -> ModuleSpec:
    local = gpt_layer_specs.get_gpt_layer_local_spec().submodules
    chosen = TransformerLayerSubmodules(
        input_layernorm=stand_ins.Norm,
        self_attention=attention(),
        self_attn_bda=get_bias_dropout_add,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=stand_ins.Norm, mlp=local.mlp, mlp_bda=get_bias_dropout_add
    )
    head = mtp.MultiTokenPredictionLayerSubmodules(
        enorm=stand_ins.Norm,
        hnorm=stand_ins.Norm,
        eh_proj=ColumnParallelLinear,
        mtp_model_layer=None,
        layer_norm=stand_ins.Norm,
    )
    heads = mtp.MultiTokenPredictionBlockSubmodules(
        layer_specs=[ModuleSpec(mtp.MultiTokenPredictionLayer, submodules=head)]
    )
    return ModuleSpec(
        HybridStack,
        submodules=HybridStackSubmodules(
            dsa_layer=ModuleSpec(TransformerLayer, submodules=chosen),
            mlp_layer=ModuleSpec(TransformerLayer, submodules=mlp),
            mtp_block_spec=ModuleSpec(mtp.MultiTokenPredictionBlock, submodules=heads),
        ),
    )


def batch(seed: int) -> dict[str, torch.Tensor]:
    """One microbatch of two rows."""
    torch.manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1))
    return {
        "input_ids": tokens[:, :-1],
        "position_ids": torch.arange(LENGTH).expand(2, -1),
        "labels": tokens[:, 1:],
        "loss_mask": torch.ones(2, LENGTH),
    }


def loss(model: Any, number: int, mask: Any = None, packed: bool = False) -> torch.Tensor:
    """Run the forward of a microbatch; packed: of one row, which holds two documents."""
    given, pack = batch(number), None
    if packed:
        given = {name: rows[:1] for name, rows in given.items()}
        ends = torch.tensor([0, 5, LENGTH], dtype=torch.int32)
        pack = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=LENGTH - 5,
            max_seqlen_kv=LENGTH - 5,
        )
    return model(attention_mask=mask, packed_seq_params=pack, **given).sum()


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
        run, attend = dsa.DSAttention.forward, dsa._run_sparse_attention
        running = ""

        def forward(layer: Any, *inputs: Any, **named: Any) -> Any:
            nonlocal running
            running = names[layer]
            return run(layer, *inputs, **named)

        def attending(*, topk_indices: torch.Tensor, **named: Any) -> Any:
            digest = hashlib.sha256(topk_indices.long().numpy().tobytes()).hexdigest()
            self.found.setdefault(running, {}).setdefault(self.doing, set()).add(digest)
            return attend(topk_indices=topk_indices, **named)

        with (
            mock.patch.object(dsa.DSAttention, "forward", forward),
            mock.patch.object(dsa, "_run_sparse_attention", attending),
        ):
            yield

    def kept(self) -> bool:
        """Whether every layer that was recomputed had the sets of its forward again."""
        again = [of for of in self.found.values() if "backward 1" in of]
        assert again and all(of["forward 1"] != of["forward 2"] for of in again)
        return all(of[f"backward {n}"] == of[f"forward {n}"] for of in again for n in (1, 2))


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
