"""Print `--help` although a docstring of a configuration has a percent sign.

What: The help texts that `ArgumentGroupFactory` takes from the docstrings of a configuration class
    have their percent signs doubled, as argparse expects them.
Why: argparse formats help texts with `%`. One docstring with "10%)." (0.18.0 to 0.19.2), "% mhc"
    (main) or "% tp" (dev) ends `--help` of every training script in a ValueError: "unsupported
    format character". In 0.17 only the configuration classes of other packages are affected.
Upstream: https://github.com/NVIDIA/Megatron-LM/pull/6211 (main, August 2026; not released) corrects
    one of the docstrings.
Remove: when `ArgumentGroupFactory` doubles percent signs.
Numerics: none (bitwise)
"""

from cppmega.edits import replacing
from cppmega.page import Edit, Patch, Source

TARGET = "megatron/training/argument_utils.py:ArgumentGroupFactory._get_field_docstrings"

PATCH = Patch(
    purpose="fix",
    edits=(
        Edit(
            target=TARGET,
            pins={
                "0.17.1": "01cfeeef65ccc5dd",
                "0.18.2": "01cfeeef65ccc5dd",
                "0.19.2": "01cfeeef65ccc5dd",
                "main-d98e8a64": "01cfeeef65ccc5dd",
                "dev-d48bd6be": "68920f6b242581b5",
            },
            edit=replacing(
                "docstring = ' '.join(docstring.split())",
                """
                # Some docstrings have doubled them already.
                docstring = ' '.join(docstring.replace('%%', '%').replace('%', '%%').split())
                """,
            ),
        ),
    ),
    reached="never",  # no run prints its help
    # Until 0.16 every help text is written for argparse.
    feature=("megatron/training/argument_utils.py:ArgumentGroupFactory",),
)


def fixed_upstream(source: Source) -> bool:
    return "'%%')" in source.text(TARGET).replace('"', "'")


def verify() -> None:
    import argparse
    import dataclasses
    import inspect
    from unittest import mock

    from megatron.training import arguments
    from megatron.training.argument_utils import ArgumentGroupFactory

    fields = [("plain", int, 1), ("doubled", int, 1)]
    options = dataclasses.make_dataclass("Options", fields)
    text = """
class Options:
    plain: int = 1
    '''A headroom of 10% (layer % stride).'''
    doubled: int = 1
    '''A share of 90%%.'''
"""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    with mock.patch.object(inspect, "getsource", return_value=text):
        ArgumentGroupFactory(options).build_group(parser)
    shown = parser.format_help()
    assert "A headroom of 10% (layer % stride)." in shown, shown
    assert "A share of 90%." in shown, shown
    assert "--num-layers" in arguments.add_megatron_arguments(parser).format_help()
