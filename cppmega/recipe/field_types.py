"""The types and bounds of a recipe's fields: a typo must not become a default."""

from __future__ import annotations

import math
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from cppmega.errors import did_you_mean
from cppmega.recipe.fields import Fields, invalid

# msgspec caches what it derives from a dataclass on the class; loading a recipe may change nothing.
msgspec.json.Decoder(Fields)


def check(recipe: Fields) -> None:
    """Compare every field with its annotation, including those of its parts, such as `mamba3`.

    Raises:
        CppmegaError: `recipe-invalid`.
    """
    for name, value, hint in _values(recipe):
        problem = _problem(value, hint)
        if problem:
            raise invalid(
                recipe,
                f"{name}={_shown(value)} is invalid: {problem}",
                "Every rank would refuse it, or train something else.",
                f"--set {name.partition('.')[0]}=..., or the recipe's file",
            )


def number_problem(name: str, value: float) -> str:
    """Why a number cannot be Megatron's argument of a field's name; empty where it can."""
    if not math.isfinite(value):
        return "expected a finite number."
    hint = _hints(Fields).get(name)
    return _problem(int(value) if value == int(value) else value, hint) if hint is not None else ""


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python's limit of the digits that it converts
        return "(a number of thousands of digits)"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _values(part: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Name, value and type of every field."""
    rows: list[tuple[str, Any, Any]] = []
    kind: Any = Fields if isinstance(part, Fields) else type(part)
    for name, hint in _hints(kind).items():
        value = getattr(part, name)
        rows.append((prefix + name, value, hint))
        if is_dataclass(value) and not isinstance(value, type):
            rows += _values(value, f"{prefix}{name}.")
    return rows


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _problem(value: object, hint: Any) -> str:
    """Why a value does not have its field's type; empty where it has."""
    if isinstance(value, float) and not math.isfinite(value):
        return "expected a finite number."
    try:
        converted = msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        words = _words(hint)
        if words:
            return f"expected one of {', '.join(words)}." + did_you_mean(
                _shown(value).strip("'"), words
            )
        return _in_python(str(error))
    except UnicodeEncodeError:  # bytes of a command line that are no text
        return "expected Unicode text."
    # A list could replace a tuple, and a dict a part; but a recipe is frozen and hashable.
    return (
        ""
        if converted == value
        else f"expected {type(converted).__name__}, got {type(value).__name__}."
    )


def _words(hint: Any) -> tuple[str, ...]:
    """The words that a field may have as values, if its values are words."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return tuple(word for part in get_args(hint) for word in _words(part))


_PYTHON = {"Expected": "expected", "null": "None", "array": "tuple", "object": "part", "`": ""}


def _in_python(message: str) -> str:
    """A message of msgspec's in Python's terms; its own are those of JSON."""
    message = message.partition(" - at ")[0]
    for word, ours in _PYTHON.items():
        message = message.replace(word, ours)
    return f"{message}."
