"""What a training script of one's own imports to add arguments to Megatron's."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add arguments, one of them with the name of a recipe's field."""
    group = parser.add_argument_group("rollouts")
    group.add_argument("--rollout-size", type=int, default=8)
    group.add_argument("--gpus", type=float, default=float("inf"))
    return parser


def adding() -> Callable[[argparse.ArgumentParser], None]:
    """Return a function that adds a switch, and returns nothing."""

    def provide(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rollout-shuffle", action="store_true")

    return provide


def again(parser: argparse.ArgumentParser) -> None:
    """Add an argument that Megatron has."""
    parser.add_argument("--lr")
