"""Wait for a module's gathered parameters, in order to read them without calling the module.

With `--overlap-param-gather`, Megatron's DDP gathers parameters during the forward pass, and waits
for them in a hook before the call of their module. A parameter that is read without such a call may
have the values of the previous step. Megatron's fused experts run these hooks in the same way.
"""

from __future__ import annotations

from typing import TypeVar

import torch

Module = TypeVar("Module", bound=torch.nn.Module)


def arrived(module: Module) -> Module:
    """Run the module's forward pre-hooks, which wait for its parameters, and return the module.

    Args:
        module: the module; parameters of its submodules are not waited for. Its hooks receive None
            as the input, which those of DDP ignore.
    """
    for hook in tuple(module._forward_pre_hooks.values()):
        hook(module, None)
    return module
