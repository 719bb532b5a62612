"""Start Python so that no file of the working directory takes the place of a library's.

`python -m` puts the working directory first on the path: a `json.py` there would be imported by
whatever we run. What this file imports is part of the interpreter and cannot be taken.
"""

import os
import sys

import cppmega

_PARENT = os.path.dirname(os.path.dirname(os.path.abspath(cppmega.__file__)))  # noqa: PTH100, PTH120


def command(module: str, *words: str, here: bool = False) -> list[str]:
    """The command line that runs one of our modules, of the same cppmega as this process's.

    Args:
        here: it also imports from the working directory, after everything that is installed, as
            the training process would.
    """
    folders = [_PARENT, *([os.getcwd()] if here else [])]  # noqa: PTH109
    code = f"import runpy, sys; sys.path += {folders!r}; "
    code += f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-P", "-c", code, *words]


def working_directory_last() -> None:
    """In a process that was started by `python -m`: the working directory loses its first place.

    A megatron in it is still found. To be called before anything else is imported.
    """
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109
        sys.path.append(sys.path.pop(0))
