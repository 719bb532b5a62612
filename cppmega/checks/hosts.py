"""Several hosts: the GPUs divide among them, and this host's name means something."""

from __future__ import annotations

import socket

from cppmega.check import Context, NotApplicable
from cppmega.errors import CppmegaError

AFTER: tuple[str, ...] = ()


def check(context: Context) -> str:
    """Divide, and look the name up.

    Raises:
        CppmegaError: `gpus-do-not-divide`, `host-name-unknown`.
        NotApplicable: one host trains.
    """
    if context.nodes == 1 or context.recipe is None:
        raise NotApplicable("one host trains")
    recipe, name = context.recipe, socket.gethostname()
    if context.nodes < 1 or recipe.gpus % context.nodes:
        raise CppmegaError(
            "gpus-do-not-divide",
            f"{recipe.gpus} GPUs of {recipe.name} do not divide into {context.nodes} hosts.",
            "torchrun starts as many ranks on each.",
            "--set gpus=... with a batch that fits, or another --nnodes",
        )
    try:
        address = socket.gethostbyname(name)
    except OSError:
        raise CppmegaError(
            "host-name-unknown",
            f"This host calls itself {name}, and no address belongs to that name.",
            "The other hosts' ranks wait for it until they give up.",
            "put the name into /etc/hosts or the name server",
        ) from None
    if address.startswith("127."):
        raise CppmegaError(
            "host-name-unknown",
            f"This host calls itself {name}, which is {address}: only itself can reach that.",
            "The other hosts' ranks wait for it until they give up.",
            "give the name its real address in /etc/hosts, or export GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME and the real name",
        )
    return f"{recipe.gpus // context.nodes} GPUs on each of {context.nodes} hosts, {name} {address}"
