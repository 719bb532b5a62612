"""Options of manifold-constrained hyper-connections (mHC), for patched code; without torch."""

from __future__ import annotations

import argparse
from typing import Any

from cppmega.rules import check_model, combinations


def check(config: Any) -> None:
    """Refuse a model's configuration that hyper-connections do not support.

    Raises:
        CppmegaError: `unsupported`, `arguments-invalid`.
    """
    check_model(config, combinations.MHC)


def width(config: Any) -> int:
    """The width of the tensors that pipeline stages exchange: of all streams or the only one."""
    streams = 1
    if getattr(config, "enable_mhc_connections", False):
        streams = config.mhc_num_residual_streams
    hidden: int = config.hidden_size
    return hidden * streams


class OneValue(argparse.Action):
    """An option with two spellings, which may be repeated only with the same value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store the value, and refuse a different one."""
        given = f"_given_{self.dest}"
        if getattr(self, given, values) != values:
            spellings = " and ".join(self.option_strings)
            parser.error(f"{spellings} are one option, but were given two values")
        setattr(self, given, values)
        setattr(namespace, self.dest, values)
