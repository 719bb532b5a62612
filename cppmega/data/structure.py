"""The meaning of a token's structure ids, kind and depth, and the languages that have them.

A token has two ids, taken from the tree-sitter tree of its document:

- its *kind* is that of the innermost node around it whose type is in the table below;
- its *depth* is the number of named nodes around it, the root not counted and capped at 15.

The position of a token is that of its first character that is not blank, or of its first one if all
are. Whatever has no tree has kind 0 and depth 0: the end of a document, the text inside of an ERROR
node, all of a document in another language, and all of one whose ERROR nodes cover more than
`MOST_ERRORS` of it, because it is not in the language that its name indicates. Between the
top-level constructs of a file, kind and depth are 0 as well.

Both ids are one byte on disk, `kind * LEVELS + depth`. A change to the tables or to
`structure_labels` must raise `DEFINITION`: a model must not be given ids of two definitions.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import PurePath
from typing import Literal

DEFINITION = 1
"""Version of the kinds, the depths and the position of a token; cards and models record it."""
LEVELS = 16
"""Depths 0 to 15; 15 means 15 or more."""
MOST_ERRORS = 0.25
"""Share of a document's bytes in ERROR nodes up to which it counts as parsed."""

COLUMN = ".structure"
"""Suffix of the dataset's name in the names of the files with the ids: `PREFIX.structure.bin`."""

Language = Literal["c", "cpp", "python"]


class Kind(IntEnum):
    """The kinds of constructs."""

    NONE = 0
    """No grammar, no parse, or none of the kinds below."""
    COMMENT = 1
    LITERAL = 2
    """Strings, characters, numbers and named constants; docstrings are strings."""
    DIRECTIVE = 3
    """Preprocessor lines, and the code that they guard; imports and using declarations."""
    TYPE = 4
    """Classes, structures, enumerations, namespaces, templates, type aliases."""
    FUNCTION = 5
    """Definitions, declarators with their parameters, lambdas, decorators."""
    CONTROL = 6
    """Branches, loops, jumps, exception handling, context managers, clauses of comprehensions."""
    STATEMENT = 7
    """Declarations, assignments and other simple statements."""
    CALL = 8
    """Calls with their arguments, and `new`."""


_C: dict[Kind, str] = {
    Kind.COMMENT: "comment",
    Kind.LITERAL: "string_literal concatenated_string system_lib_string char_literal "
    "number_literal true false null",
    Kind.DIRECTIVE: "preproc_include preproc_def preproc_function_def preproc_call preproc_if "
    "preproc_ifdef preproc_elif preproc_elifdef preproc_else",
    Kind.TYPE: "struct_specifier union_specifier enum_specifier type_definition",
    Kind.FUNCTION: "function_definition function_declarator",
    Kind.CONTROL: "if_statement else_clause for_statement while_statement do_statement "
    "switch_statement case_statement labeled_statement conditional_expression break_statement "
    "continue_statement return_statement goto_statement seh_try_statement seh_except_clause "
    "seh_finally_clause seh_leave_statement",
    Kind.STATEMENT: "declaration field_declaration expression_statement",
    Kind.CALL: "call_expression",
}

_ONLY_CPP: dict[Kind, str] = {
    Kind.LITERAL: "raw_string_literal user_defined_literal",
    Kind.DIRECTIVE: "using_declaration",
    Kind.TYPE: "class_specifier namespace_definition namespace_alias_definition alias_declaration "
    "template_declaration concept_definition",
    Kind.FUNCTION: "lambda_expression",
    Kind.CONTROL: "for_range_loop try_statement catch_clause throw_statement co_return_statement "
    "co_yield_statement",
    Kind.STATEMENT: "friend_declaration static_assert_declaration template_instantiation",
    Kind.CALL: "new_expression",
}

_PYTHON: dict[Kind, str] = {
    Kind.COMMENT: "comment",
    Kind.LITERAL: "string concatenated_string integer float true false none ellipsis",
    Kind.DIRECTIVE: "import_statement import_from_statement future_import_statement",
    Kind.TYPE: "class_definition type_alias_statement",
    Kind.FUNCTION: "function_definition lambda decorator",
    Kind.CONTROL: "if_statement elif_clause else_clause for_statement while_statement "
    "try_statement except_clause finally_clause with_statement match_statement case_clause "
    "conditional_expression for_in_clause if_clause break_statement continue_statement "
    "return_statement raise_statement yield",
    Kind.STATEMENT: "expression_statement assert_statement delete_statement global_statement "
    "nonlocal_statement pass_statement print_statement exec_statement",
    Kind.CALL: "call",
}


def _by_type(*tables: dict[Kind, str]) -> dict[str, Kind]:
    lines = [line for table in tables for line in table.items()]
    return {name: kind for kind, names in lines for name in names.split()}


NODE_TYPES: dict[Language, dict[str, Kind]] = {
    "c": _by_type(_C),
    "cpp": _by_type(_C, _ONLY_CPP),
    "python": _by_type(_PYTHON),
}
"""Language -> type of a node -> its kind. Other types leave the kind of the node around them."""

_SUFFIXES: dict[str, Language] = {
    **dict.fromkeys((".c",), "c"),
    # A header may be of either language, and the grammar of C++ reads nearly all of C.
    **dict.fromkeys((".h", ".cc", ".cpp", ".cxx", ".hh", ".hpp", ".hxx"), "cpp"),
    **dict.fromkeys((".py", ".pyi"), "python"),
}
_NAMES: dict[str, Language] = {"c++": "cpp", "python": "python"}
"""Names of languages that are not a suffix of their files."""


def language_of(name: str) -> Language | None:
    """The language of a document, from its name or from the path or the suffix of its file.

    Args:
        name: such as `src/main.cc`, `.py`, `py`, `C++` or `python`; case does not matter.

    Returns:
        None: there is no grammar for it, and its structure ids are 0.
    """
    lower = name.lower()
    suffix = PurePath(lower).suffix or f".{lower.lstrip('.')}"
    return _NAMES.get(lower) or _SUFFIXES.get(suffix)
