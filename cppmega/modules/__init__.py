"""Names under which patched files on disk import what now lies in `features` and `runtime`."""

from cppmega.host.moved_modules import keep_names

_MOVED = {
    "mhc": "features.mhc.connections",
    "mhc_options": "features.mhc.options",
    "mhc_layers": "features.mhc.layers",
    "mhc_depths": "features.mhc.depths",
    "mhc_recompute": "features.mhc.recompute",
    "mixer_sizes": "sizes.mixers",
    "mixer_calls": "features.mixers.calls",
    "m2rnn": "features.mixers.m2rnn",
    "mamba3": "features.mixers.mamba3",
    "bf16_products": "features.mixers.bf16_products",
    "padded_columns": "features.mixers.padded_columns",
    "hybrid_mixers": "features.mixers.hybrid",
    "kept_fp32": "features.kept_fp32",
    "arrived": "features.arrived",
    "stated_sizes": "sizes.stated",
    "dsa_layer_kinds": "features.dsa.layer_kinds cppmega.sizes.dsa_layers",
    "dsa_loss_schedule": "features.dsa.loss_schedule cppmega.sizes.dsa_loss",
    "dsa_forward": "features.dsa.forward",
    "input_embedding_sizes": "sizes.embeddings",
    "input_embeddings": "features.embeddings.layer",
    "ngram_hash": "features.embeddings.ngram_hash",
    "structure_embedding": "features.embeddings.structure",
    "linear_cross_entropy": "features.linear_cross_entropy.module",
    "linear_cross_entropy_heads": "features.linear_cross_entropy.heads",
    "dsa_backend_limits": "runtime.dsa_backend_limits",
    "dsa_index_checkpoints": "runtime.dsa_index_share_checkpoints",
    "dsa_indexer_prologue": "runtime.dsa_indexer_prologue",
    "dsa_indexer_rows": "runtime.dsa_indexer_rope",
    "direct_operators": "runtime.te_permutation_calls",
    "grad_checks": "runtime.grad_checks_no_host_sync",
    "host_copies": "runtime.async_save_host_copies",
    "optimizer_shards": "runtime.optimizer_copies_at_once",
    "te_layers": "runtime.te_plain_layers",
    "mhc_in_megatron": "runtime.mhc_fused_kernels",
}

keep_names(__name__, {old: f"cppmega.{new}" for old, new in _MOVED.items()})
