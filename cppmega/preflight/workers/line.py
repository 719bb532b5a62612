"""A launch line in the installed version's own parser and validation."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import linecache
import math
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any

from cppmega.catalogue import megatron_args
from cppmega.errors import CppmegaError, closest
from cppmega.host import command_words, redact
from cppmega.preflight.messages import ParsedLine, RankOrder


def parse(order: RankOrder) -> ParsedLine:
    """Run a line through the installed parser and its validation, as a launched script does.

    Raises:
        CppmegaError: `import-failed`, of a module that adds arguments.
    """
    from cppmega.training import parsing

    try:
        from megatron.training import arguments
    except ImportError as error:
        return ParsedLine(refused=f"there is no parser: {error}")
    argv = list(order.argv or ())
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(order.world or 1))
    sys.argv = ["train", *argv]
    added = Added(order.arguments_from, order.respells)
    args, reason = parsing.parsed(
        lambda: arguments.parse_args(added.provide, ignore_unknown_args=True)
    )
    if reason:
        return ParsedLine(refused=reason)
    if getattr(args, "yaml_cfg", None):
        return ParsedLine(refused="the file of --yaml-cfg replaces the line, and is not inspected")
    plain = _respelled({name: _plain(value) for name, value in vars(args).items()})
    if order.world is None:
        args.world_size = _fewest_ranks(args)
    invalid, unset = _invalid(arguments, args)
    return ParsedLine(
        unknown=added.unknown(sys.argv[1:]),
        args=plain,
        respelled=added.respelled,
        added=added.names,
        invalid=invalid,
        unset=unset,
    )


class Added:
    """The arguments that a script adds to Megatron's, and the parser that has them all."""

    def __init__(self, sources: Sequence[str], respells: bool = False) -> None:
        """Import what adds arguments: `MODULE`, `MODULE:FUNCTION` or `MODULE:FACTORY()`.

        Args:
            sources: what to import.
            respells: whether the line's options may be spelled as fields; see `respelled`.

        Raises:
            CppmegaError: `import-failed`.
        """
        self._respells = respells
        self.respelled: tuple[str, ...] = ()
        """The options of the line that were spelled as fields."""
        self._parser: argparse.ArgumentParser | None = None
        self._providers: dict[str, Callable[[argparse.ArgumentParser], Any]] = {}
        self.names: tuple[str, ...] = ()
        """Names of the added arguments in the parsed ones."""
        for source in sources:
            module, _, function = source.partition(":")
            with _named(source):
                provider: Any = importlib.import_module(module)
                if function:
                    provider = getattr(provider, function.removesuffix("()"))
                    self._providers[source] = provider() if function.endswith("()") else provider

    def provide(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add them; the `extra_args_provider` of Megatron's `parse_args`."""
        own = {action.dest for action in parser._actions}
        for source, add in self._providers.items():
            with _named(source):
                parser = add(parser) or parser
        self.names = tuple(
            {action.dest: "" for action in parser._actions if action.dest not in own}
        )
        self._parser = parser
        if self._respells:
            argv, self.respelled = respelled(sys.argv[1:], parser)
            sys.argv[1:] = argv
        return parser

    def unknown(self, argv: Sequence[str]) -> dict[str, str]:
        """The words of a line that none of the arguments explains, each with the nearest one."""
        if self._parser is None:  # a module has replaced Megatron's `parse_args` by its own
            return {}
        known = self._parser._option_string_actions
        words = redact.words(self._parser.parse_known_args([*argv])[1])
        return {
            shlex.join(option.words): next(iter(closest(option.name, known)), "")
            for option in command_words.read(words)
        }


def respelled(
    words: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[list[str], tuple[str, ...]]:
    """A line whose options are the fields of a dataclass, in the spelling of Megatron's parser.

    Parsers that are made of dataclasses, such as ms-swift's, take `--micro_batch_size 2` and
    `--finetune true`. An option that Megatron lacks, or has without this value, stays as it is.

    Returns:
        The line, and the options that were spelled in this way.
    """
    line: list[str] = []
    changed = []
    for option in command_words.read(words):
        name = option.name.replace("_", "-")
        action = parser._option_string_actions.get(name)
        is_switch = action is not None and action.nargs == 0
        if action is None or (name == option.name and not is_switch):
            line += option.words
            continue
        given = [name, *option.values]
        if is_switch and option.values in (("true",), ("false",)):
            given = [name] if option.values == ("true",) else []
        if _is_parsed(given, parser):
            line += given
            changed += [option.name] if given != list(option.words) else []
        else:
            line += option.words
    return line, tuple(changed)


def _is_parsed(words: list[str], parser: argparse.ArgumentParser) -> bool:
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            return not parser.parse_known_args(words)[1]
        except SystemExit:
            return False


@contextlib.contextmanager
def _named(source: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # a module of the user's may also end the process
        raise CppmegaError(
            "import-failed",
            f"--arguments-from {source} adds no arguments: {type(error).__name__}: {error}",
            "Arguments of the script's own would be taken for mistakes.",
            "name a MODULE that is imported as in the training process (PYTHONPATH), or "
            "MODULE:FUNCTION for a FUNCTION(parser); MODULE:FACTORY() if a call returns it",
        ) from error


def _respelled(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments with those that validation sets for other ones: patched code sees no others."""
    if args.get("use_rotary_position_embeddings"):
        args["position_embedding_type"] = "rope"
    if args.get("recompute_activations"):
        args["recompute_granularity"] = "selective"
    if "/" in (pattern := megatron_args.layer_pattern(SimpleNamespace(**args))):
        args["mtp_num_layers"] = pattern.count("/")
    if {"+", "D"} & {*pattern}:
        args["multi_latent_attention"] = True
    return args


def _fewest_ranks(args: Any) -> int:
    """The fewest ranks that the parallel sizes of a line allow."""

    def size(name: str) -> int:
        return getattr(args, name, None) or 1

    tensor = max(size("tensor_model_parallel_size"), size("tensor_parallel_num_weight_shards"))
    experts = getattr(args, "expert_tensor_parallel_size", None) or tensor
    return size("pipeline_model_parallel_size") * math.lcm(
        tensor * size("context_parallel_size"), experts * size("expert_model_parallel_size")
    )


def _invalid(arguments: Any, args: Any) -> tuple[str, tuple[str, ...]]:
    """Why Megatron's own validation would stop the run, and which arguments it misses."""
    import torch

    if getattr(args, "use_checkpoint_args", False):
        return "", ()  # most of what is validated comes from the checkpoint
    if not torch.cuda.is_available():  # the validation asks which GPU it is
        torch.cuda.get_device_capability = lambda *_: (9, 0)
        nine: Any = SimpleNamespace(major=9, minor=0)
        torch.cuda.get_device_properties = lambda *_: nine
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            arguments.validate_args(args)
            if "transformer_engine" in sys.modules:  # the config asks for its version
                arguments.core_transformer_config_from_args(args)
    except (AssertionError, ValueError, NotImplementedError) as error:
        frame, line = [*traceback.walk_tb(error.__traceback__)][-1]
        code = linecache.getline(frame.f_code.co_filename, line).strip()
        missing = [*re.findall(r"\bargs\.(\w+) is not None", code), frame.f_locals.get("arg")]
        return str(error).strip() or f"it requires `{code}`", tuple(
            name.removeprefix("encoder_")  # the older spelling, which validation asks for last
            for name in missing
            if name and getattr(args, name, "") is None
        )
    except (ArithmeticError, LookupError, TypeError, OSError) as error:  # of a value
        return f"{type(error).__name__}: {error}", ()
    except SystemExit:
        return printed.getvalue().strip().rpartition("\n")[2] or "it ends the process", ()
    except Exception as error:
        # Not a refusal: validation needed something that only a rank has.
        print(f"validate_args: {type(error).__name__}: {error}", file=sys.stderr)
    return "", ()


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | str | None) else str(value)
