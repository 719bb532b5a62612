"""What a run folder says of itself, read as if anybody could have written in it.

Disks fill up, copies break off, and another release writes another schema: one such folder must not
take down the table of all runs, and must not be compared as if it said nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA = 1
_NONE = type(None)
_Types = Mapping[str, type | tuple[type, ...]]
_MANIFEST: _Types = {
    **{"created": (int, float), "nodes": int, "nproc": int, "arguments": list},
    **dict.fromkeys(("recipe", "overlay", "megatron", "options", "data"), dict),
    **dict.fromkeys(("environment", "stack"), dict),
}
_MAY_BE: _Types = dict.fromkeys(("tmux", "resumes", "save", "load", "metrics"), (str, _NONE))
_STATUS: _Types = {
    **{"host": str, "boot": str, "pid": int, "since": str, "stop": str, "workers": dict},
    **{"started": (int, float), "ended": (int, float, _NONE), "exit": (int, _NONE)},
    **{"agent": int, "agent_since": str, "first_rank": int, "failure": dict},
    **{"namespace": str, "note": str},
}
_FAILURE: _Types = {
    **{"rank": (int, _NONE), "exit": (int, _NONE), "signal": str, "message": str},
    **{"local_rank": int, "others": list},
}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none."""
    if not path.is_file():  # a pipe would be waited for
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def manifest(path: Path) -> tuple[dict[str, Any], str]:
    """The manifest, and what is wrong with it: then it is empty."""
    found = read_json(path)
    schema = found.get("schema", SCHEMA)
    if not found:
        return {}, f"{path.name} cannot be read"
    if schema != SCHEMA:
        return {}, f"{path.name} has schema {schema}, another release of cppmega's"
    odd = _odd(found, {**_MANIFEST, **_MAY_BE})
    return ({}, f"{path.name} is damaged ({', '.join(odd)})") if odd else (found, "")


def missing(found: Mapping[str, Any]) -> list[str]:
    """What every launch writes, and is not there."""
    return [name for name in _MANIFEST if name not in found]


def status(path: Path) -> dict[str, Any]:
    """What the process in charge wrote; empty before it did, and where it is damaged."""
    found = read_json(path)
    return {} if "host" not in found or _odd(found, _STATUS) else found


def failure(found: Mapping[str, Any]) -> dict[str, Any]:
    """The failure in a status; empty where there is none, or a part of it is missing or odd."""
    failure = found.get("failure", {})
    needed = {"exit", "message"} | ({"local_rank"} if failure.get("rank") is not None else set())
    return {} if _odd(failure, _FAILURE) or needed - set(failure) else dict(failure)


def _odd(found: Mapping[str, Any], types: _Types) -> list[str]:
    return [n for n, wanted in types.items() if n in found and not isinstance(found[n], wanted)]
