"""Launch lines, parsed and validated by the Megatron of this process, without a GPU.

Imported in the process that runs a tree, never by pytest itself.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import types
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import torch
from megatron.core.transformer import transformer_config
from megatron.training import arguments

from tests.support import te_stand_ins

BASE = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--max-position-embeddings", "32", "--micro-batch-size", "1"),
    *("--global-batch-size", "1", "--lr", "1e-4", "--train-iters", "1", "--bf16"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "128", "--mock-data"),
)
"""A small GPT; further options replace these, as the last one of a name counts."""

_ADD = arguments.add_megatron_arguments
te_stand_ins.read_options_once()


class RefusedError(Exception):
    """Megatron does not accept the line."""


def parsed(*line: str) -> Any:
    """The arguments before validation: what the parser alone makes of them."""
    with (
        _without_gpu(),
        mock.patch.object(sys, "argv", ["train", *BASE, *line]),
        mock.patch.object(arguments, "add_megatron_arguments", _with_options),
    ):
        return _accepted(arguments.parse_args)


def validated(*line: str) -> Any:
    """The arguments as training reads them."""
    args = parsed(*line)
    with _without_gpu():
        _accepted(arguments.validate_args, args)
    return args


def configured(args: Any) -> Any:
    """The configuration of the model of validated arguments."""
    with _without_gpu():
        return _accepted(arguments.core_transformer_config_from_args, args)


@cache
def _options() -> argparse.ArgumentParser:
    return _ADD(argparse.ArgumentParser(allow_abbrev=False))


def build_parser_once() -> None:
    """Let every parse of this process use one parser; none may add arguments to it."""
    arguments.add_megatron_arguments = _with_options


def _with_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Megatron's parser of this process, which takes long to build."""
    return _options()


def _accepted(work: Any, *given: Any) -> Any:
    try:
        return work(*given)
    except (SystemExit, AssertionError, ValueError, KeyError) as error:
        raise RefusedError(str(error)) from error


@contextlib.contextmanager
def _without_gpu() -> Iterator[None]:
    te_stand_ins.kernels_of_experts()
    hopper = types.SimpleNamespace(major=9)
    with (
        mock.patch.dict(os.environ, {"WORLD_SIZE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        mock.patch.object(torch.cuda, "get_device_properties", lambda *_: hopper),
        mock.patch.object(transformer_config, "is_te_min_version", lambda *_, **__: True),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        yield
