"""Read a module's parameters without calling it, once they have arrived.

With `--overlap-param-gather`, Megatron's DDP gathers parameters during the forward pass, and waits
for them in a hook before the call of their module. What is read without such a call may have the
values of the step before. Megatron's fused experts run these hooks in the same way.
"""

from __future__ import annotations

from typing import TypeVar

import torch

Module = TypeVar("Module", bound=torch.nn.Module)


def arrived(module: Module) -> Module:
    """Run what hooks run before a call of the module, and return it.

    Args:
        module: its own parameters are waited for, not those of modules in it. The hooks are given
            None for the input, which those of DDP ignore.
    """
    for hook in tuple(module._forward_pre_hooks.values()):
        hook(module, None)
    return module
