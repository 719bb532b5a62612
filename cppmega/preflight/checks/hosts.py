"""Hosts find each other: the GPUs divide among them, and this host's name has an address."""

from __future__ import annotations

import socket

from cppmega.errors import CppmegaError
from cppmega.host.wording import counted
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable, Remark
from cppmega.training.requirements import Start


def check(context: Context) -> str:
    """Divide the GPUs, and look up this host's name.

    Raises:
        CppmegaError: `wrong-world-size`, `host-name-unknown`.
        NotApplicable: one host trains, and its name has an address.
    """
    name = socket.gethostname()
    if context.nodes == 1 or context.recipe is None:
        return _single_host(name, launched=context.folder is not None)
    recipe = context.recipe
    Start(recipe, nodes=context.nodes).check("division into hosts")
    address = _address(name)
    if address is None:
        raise CppmegaError(
            "host-name-unknown",
            f"This host is called {name}, and that name has no address.",
            "The other hosts' ranks wait for it until they time out.",
            "add the name to /etc/hosts or to the name server",
        )
    if address.startswith("127."):
        raise CppmegaError(
            "host-name-unknown",
            f"This host is called {name}, which is {address}: no other host can reach that.",
            "The other hosts' ranks wait for it until they time out.",
            "give the name its real address in /etc/hosts, or export GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME and the real name",
        )
    each = counted(recipe.gpus // context.nodes, "GPU")
    return f"{each} on each of {context.nodes} hosts, {name} {address}"


def _single_host(name: str, *, launched: bool) -> Remark:
    """One host, whose name is torchrun's default rendezvous address."""
    if _address(name) is not None:
        raise NotApplicable("one host trains")
    lacking = f"this host is called {name}, and that name has no address"
    if launched:
        return Remark(f"{lacking}: the ranks meet at 127.0.0.1")
    return Remark(
        f"{lacking}. cppmega launch makes the ranks meet at 127.0.0.1; under torchrun they wait "
        f"for each other forever: torchrun --local-addr 127.0.0.1, or add {name} to /etc/hosts"
    )


def _address(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None
