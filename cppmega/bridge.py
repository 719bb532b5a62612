"""Convert checkpoints of Hugging Face by Megatron-Bridge, on the patched tree and under the guard.

`cppmega checkpoint` starts it: `python -m cppmega.run --no-steps -m cppmega.bridge VERB FROM TO`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from cppmega.errors import CppmegaError


def convert(verb: str, source: str, to: Path, model: str | None = None) -> None:
    """Convert a checkpoint.

    Args:
        verb: `import` from Hugging Face, or `export` to it.
        source: the checkpoint; for an import, a folder or the name of a model on the hub.
        to: the folder that is written.
        model: for an export, the model whose configuration and tokenizer the result gets.

    Raises:
        CppmegaError: `package-missing`, `checkpoint-exists`.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise CppmegaError(
            "checkpoint-exists",
            f"{to} exists, and is not an empty folder.",
            "A checkpoint is never overwritten.",
            "choose another folder",
        )
    bridge = _auto_bridge()
    if verb == "import":
        bridge.import_ckpt(source, str(to))
    else:
        bridge.from_hf_pretrained(model).export_ckpt(source, str(to))


def _auto_bridge() -> Any:
    try:
        from megatron.bridge import AutoBridge

        for used in ("model_load_save", "post_training.checkpointing"):
            import_module(f"megatron.bridge.training.{used}")  # missed at the end otherwise
    except ImportError as error:
        raise CppmegaError(
            "package-missing",
            f"Megatron-Bridge cannot be imported: {error}.",
            "It knows which weights of Hugging Face are which of Megatron. It needs Transformer "
            "Engine, which is built for a GPU.",
            "pip install --no-deps megatron-bridge, and what its import still lacks, in the "
            "environment that trains; its releases name the megatron-core that they are for",
        ) from error
    return AutoBridge


if __name__ == "__main__":
    verb, source, to, *model = sys.argv[1:]
    convert(verb, source, Path(to), *model)
