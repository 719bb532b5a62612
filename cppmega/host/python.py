"""Start Python so that no file of the working directory shadows a library.

`python -m` puts the working directory first on the path: a `json.py` there would be imported in
place of Python's own. The modules that this file imports are part of the interpreter and cannot be
shadowed.
"""

import os
import sys

import cppmega

_PARENT = os.path.dirname(os.path.dirname(os.path.abspath(cppmega.__file__)))  # noqa: PTH100, PTH120


def command(module: str, *words: str, here: bool = False) -> list[str]:
    """The command line that runs a module of cppmega, from the same installation as this process.

    Args:
        here: also import from the working directory, after everything that is installed, as the
            training process would.
    """
    folders = [_PARENT, *([os.getcwd()] if here else [])]  # noqa: PTH109
    code = f"import runpy, sys; sys.path += {folders!r}; "
    code += f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-P", "-c", code, *words]


def working_directory_last() -> None:
    """Move the working directory, which `python -m` put first on the path, to its end.

    A megatron in it is still found. Call this before anything else is imported.
    """
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109
        sys.path.append(sys.path.pop(0))
