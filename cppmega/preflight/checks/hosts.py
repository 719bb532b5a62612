"""Hosts find each other: the GPUs divide among them, and names and interfaces have addresses."""

from __future__ import annotations

import socket

from cppmega.errors import CppmegaError
from cppmega.host.wording import counted
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable, Problems, Remark
from cppmega.training.requirements import Start

APART: tuple[str, ...] = ("wrong-world-size", "host-name-unknown")

_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def check(context: Context) -> Problems:
    """Look up the interfaces that variables name and this host's name, and divide the GPUs.

    Yields:
        `no-such-interface`, `wrong-world-size`, `host-name-unknown`.

    Raises:
        NotApplicable: one host trains, its name has an address, and no variable names an interface.
    """
    named = {name: context.environ.get(name, "") for name in _INTERFACES}
    named = {name: value for name, value in named.items() if value and value[0] != "^"}
    here = [name for _, name in socket.if_nameindex()]
    for variable, value in named.items():
        wanted = value.removeprefix("=").split(",")
        # NCCL accepts the beginning of a name, unless an = precedes it.
        exact = value.startswith("=") or variable != "NCCL_SOCKET_IFNAME"
        if not any(one == i or (i.startswith(one) and not exact) for one in wanted for i in here):
            yield CppmegaError(
                "no-such-interface",
                f"{variable}={value}; this host has {', '.join(here)}.",
                "Ranks wait for each other until they time out, or end with an NCCL error.",
                f"unset {variable}, or name one of them",
            )
    detail = ", ".join(f"{variable}={value}" for variable, value in named.items())
    name, recipe = socket.gethostname(), context.recipe
    address = _address(name)
    if context.nodes == 1 or recipe is None:
        if address is None:
            return _nameless(name, launched=context.folder is not None)
        if not named:
            raise NotApplicable("one host trains")
        return detail
    Start(recipe, nodes=context.nodes).check("division into hosts")
    if address is None or address.startswith("127."):
        where = f"is {address}: no other host can reach that" if address else "has no address"
        yield CppmegaError(
            "host-name-unknown",
            f"This host is called {name}, which {where}.",
            "The other hosts' ranks wait for it until they time out.",
            "give the name its real address in /etc/hosts or in the name server, or export "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME and the real name",
        )
    each = counted(recipe.gpus // context.nodes, "GPU")
    return "; ".join(
        filter(None, [f"{each} on each of {context.nodes} hosts, {name} {address}", detail])
    )


def _nameless(name: str, *, launched: bool) -> Remark:
    """The remark on one host, whose name is torchrun's default rendezvous address."""
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
