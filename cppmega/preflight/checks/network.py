"""The network interfaces that environment variables name for NCCL and Gloo exist on this host."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from cppmega.errors import CppmegaError
from cppmega.preflight.context import Context
from cppmega.preflight.findings import NotApplicable, refuse

_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def check(context: Context) -> str:
    """Compare the variables with the host's interfaces.

    Raises:
        CppmegaError: `no-such-interface`.
        NotApplicable: no variable names one.
    """
    named = {name: context.environ.get(name, "") for name in _VARIABLES}
    named = {name: value for name, value in named.items() if value and value[0] != "^"}
    if not named:
        raise NotApplicable("no variable names an interface")
    refuse(_missing_interfaces(named, [name for _, name in socket.if_nameindex()]))
    return ", ".join(f"{name}={value}" for name, value in named.items())


def _missing_interfaces(named: dict[str, str], here: list[str]) -> Iterator[CppmegaError]:
    for name, value in named.items():
        wanted = value.removeprefix("=").split(",")
        # NCCL accepts the beginning of a name, unless an = precedes it.
        exact = value.startswith("=") or name != "NCCL_SOCKET_IFNAME"
        if not any(one == i or (i.startswith(one) and not exact) for one in wanted for i in here):
            yield CppmegaError(
                "no-such-interface",
                f"{name}={value}; this host has {', '.join(here)}.",
                "Ranks wait for each other until they time out, or end with an NCCL error.",
                f"unset {name}, or name one of them",
            )
