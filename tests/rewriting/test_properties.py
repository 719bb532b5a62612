"""Generated modules: exactly the edit, or a named error, and never anything else."""

from __future__ import annotations

import ast
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cppmega.edits import replacing
from cppmega.errors import CppmegaError
from cppmega.page import Edit
from cppmega.rewriting import fingerprint, marks, rewrite, source
from cppmega.rewriting.rewrite import Step
from tests.support.lab import FILES, TARGET, A, Lab
from tests.support.made import pin, snapshot

pytestmark = pytest.mark.slow

QUICK = settings(
    max_examples=100,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
_OURS = re.compile(rf"(?:  #|;) {re.escape(marks.COMMENT)}page")
_EDIT = Edit("m.py:t", {}, replacing("payload(1)", "payload(2, extra)"))


@dataclass(frozen=True)
class Module:
    """A generated file and what an edit of its target must make of it."""

    data: bytes
    symbol: str
    encoding: str
    payloads: int
    duplicated: bool

    @property
    def wanted(self) -> bytes:
        old, new = (text.encode() for text in ("payload(1)", "payload(2, extra)"))
        return self.data.replace(old, new)


_ZERO = "\0"
"""Begins a line that stands at column zero, whatever is around it."""
_WRAPPERS: dict[str, tuple[list[str], list[str]]] = {
    "class": (["class W{at}:"], []),
    "def": (["def W{at}():"], []),
    "async": (["async def W{at}():"], []),
    "if": (["if x:  # why"], []),
    "else": (["if x:", "{unit}pass", "else:"], []),
    "try": (["try:"], ["except E:", "{unit}pass"]),
    "finally": (["try:", "{unit}pass", "finally:"], []),
    "with": (["with x as y:"], []),
    "for": (["for y in x:"], ["else: pass"]),
    "case": (["match x:", "{unit}case 1:"], []),
}
_NAMED = ("class", "def", "async")
_INDENTS = ("    ", "\t", "  ", " ", "\t ")
_DECORATORS = (
    "@deco",
    "@deco(1,\n  2)",
    "@ deco . x",
    "# between",
    "@deco[  # why\n 0]",
    "@\\\ndeco",
)
_HEADS = (
    "({args})",
    "( {args}, /, *, k = 'é' )",
    "(\n  {args},\n        # argument\n)",
    "({args}) -> 'x'",
    " \\\n ({args})",
)
_DOCS = ('"""Doc."""', "'''Doc\n\n   of several\n# lines\n'''", 'r"doc" "ument"', "# no doc")
_FILLER = (
    "x = 1",
    f"x = '''a\n{_ZERO}# no comment\n{_ZERO}    \n\tb'''",
    "# a comment",
    f"{_ZERO}   # odd comment",
    _ZERO,
    f"{_ZERO}  \t",
    "x = [1,  # one\n\n  2,\n]",
    "x = 1; y = 2;",
    "x = 1 + \\\n  2",
    "def other(): pass",
    "if x: pass",
    "lambda: 0",
    "f'{x!r:>{y}} {{'",
    "async def u(): await x",
    "x = 'é'",
    f"{_ZERO}\f",
)
_CALLS = ("{}", "x = {}", "x = [\n {},  # é\n]", "if {}: pass", "f'{{{}}}'")


def _nested(lines: list[str], unit: str) -> list[str]:
    return [line if line.startswith(_ZERO) else unit + line for line in lines]


def _lines(texts: list[str]) -> list[str]:
    return [line for text in texts for line in text.split("\n")]


@st.composite
def targets(draw: st.DrawFn, unit: str, payloads: int) -> list[str]:
    """Lines of one definition of `t` with so many calls of payload(1)."""
    filler = st.lists(st.sampled_from((*_FILLER, "def t(): pass", "return")), max_size=3)
    kind = draw(st.sampled_from(("def", "async def", "class")))
    heads = ("", "(object)", "( object ,\n  )") if kind == "class" else _HEADS
    head = f"{kind} t{draw(st.sampled_from(heads))}".format(args="a, b=(1, 2)")
    lines = _lines(draw(st.lists(st.sampled_from(_DECORATORS), max_size=3)))
    while lines and lines[0].startswith("#"):  # above the first decorator it is not the target's
        lines.pop(0)
    if kind != "class" and draw(st.integers(0, 3)) == 0:
        body = "; ".join(["x = 1", *["payload(1)"] * payloads, "pass"])
        return [*lines, *_lines([f"{head}: {body}"])]
    lines += _lines([head + draw(st.sampled_from((":", " :  # said")))])
    texts = draw(st.lists(st.sampled_from(_DOCS), max_size=1)) + draw(filler)
    for _ in range(payloads):
        texts += [draw(st.sampled_from(_CALLS)).format("payload(1)"), *draw(filler)]
    texts = [text for text in texts if kind != "class" or text != "return"]
    return [*lines, *_nested([*_lines(texts), "pass"], unit)]


@st.composite
def modules(draw: st.DrawFn) -> Module:
    """A module with one target `t` (or, to be refused, two) somewhere in it."""
    unit = draw(st.sampled_from(_INDENTS))
    filler = st.lists(st.sampled_from(_FILLER), max_size=3)
    payloads = draw(st.sampled_from((1, 1, 1, 1, 0, 2)))
    duplicated = draw(st.integers(0, 9)) == 0
    lines = draw(targets(unit, payloads))
    if duplicated:
        lines += draw(targets(unit, payloads))
    wrappers = draw(st.lists(st.sampled_from(tuple(_WRAPPERS)), max_size=3))
    for at, wrapper in enumerate(wrappers):  # from the inside out
        before, after = (
            [line.format(at=at, unit=unit) for line in part] for part in _WRAPPERS[wrapper]
        )
        inside = _nested([*_lines(draw(filler)), *lines, *_lines(draw(filler))], unit)
        lines = [*before, *(_nested(inside, unit) if wrapper == "case" else inside), *after]
    names = [f"W{at}" for at, wrapper in enumerate(wrappers) if wrapper in _NAMED]
    lines = [*_lines(draw(filler)), *lines, *_lines(draw(filler))]
    lines = ["payload = extra = deco = E = x = y = None", *lines, "class Z:", f"{unit}def t(): 0"]
    encoding = draw(st.sampled_from(("utf-8", "utf-8-sig", "latin-1", "cp1252")))
    if not encoding.startswith("utf-8"):
        lines.insert(0, f"# -*- coding: {encoding} -*-")
    ends = draw(st.sampled_from((("\n",), ("\r\n",), ("\r",), ("\n", "\r\n"))))
    text = "".join(line.replace(_ZERO, "") + draw(st.sampled_from(ends)) for line in lines)
    if draw(st.booleans()):
        text = text.rstrip("\r\n")
    symbol = ".".join([*reversed(names), "t"])
    return Module(text.encode(encoding), symbol, encoding, payloads, duplicated)


@given(modules())
@QUICK
def test_exactly_the_edit_or_a_named_error(module: Module) -> None:
    """Every byte outside of the target, and every byte of it that the edit did not mean."""
    try:
        tree = ast.parse(module.data)
    except (SyntaxError, ValueError):
        with pytest.raises(CppmegaError):
            _rewritten(module)
        return
    alone = len(source.find(tree, module.symbol)) == 1
    assert alone != module.duplicated
    if module.duplicated or module.payloads != 1:
        with pytest.raises(CppmegaError) as caught:
            _rewritten(module)
        wanted = "target-ambiguous" if module.duplicated else "edit-mismatch"
        assert caught.value.name == wanted
        return
    done = _rewritten(module)
    text = done.data.decode(module.encoding)
    assert len(_OURS.findall(text)) == 1
    assert _OURS.sub("", text) == module.wanted.decode(module.encoding)
    assert ast.dump(ast.parse(done.data)) == ast.dump(ast.parse(module.wanted))
    assert _rewritten(module).data == done.data


def _rewritten(module: Module) -> rewrite.Rewritten:
    edit = Edit(f"m.py:{module.symbol}", {}, _EDIT.edit)
    return rewrite.rewrite(module.data, "m.py", [Step("page", edit, marked=False)])


def test_generated_modules_are_python() -> None:
    """The property above is worth something only if its modules can be parsed."""
    good: list[bool] = []

    @given(modules())
    @QUICK
    def collect(module: Module) -> None:
        good.append(_parses(module.data))

    collect()
    assert sum(good) > 0.9 * len(good) > 50


def _parses(data: bytes) -> bool:
    try:
        ast.parse(data)
    except (SyntaxError, ValueError):
        return False
    return True


# -- fingerprints -------------------------------------------------------------------------------

_STATEMENTS = (
    "x = 1",
    "return g(a,\n{c}b)",
    "y = 'é'",
    "with a as b:\n{n}pass",
    "del x",
    "x += [1]",
)


@given(
    statements=st.lists(st.sampled_from(_STATEMENTS), min_size=1, max_size=5),
    indent=st.sampled_from(_INDENTS),
    outer=st.sampled_from(("", "    ", "\t")),
    comment=st.sampled_from(("", "  # c", "\t")),
    blank=st.sampled_from(("", "\n", "\n   \n", "\n# c\n")),
    doc=st.sampled_from(("", '"""Doc."""', "'d' 'oc'")),
    newline=st.sampled_from(("\n", "\r\n", "\r")),
)
@QUICK
def test_fingerprint_is_about_code(
    statements: list[str], indent: str, outer: str, comment: str, blank: str, doc: str, newline: str
) -> None:
    """Indentation, comments, blank lines, docstrings and line ends do not change it."""

    def text(indent: str, outer: str, comment: str, blank: str, doc: str) -> str:
        inner = outer + indent
        rows = [f"{outer}def f(a, b):{comment}"] + ([inner + doc] if doc else [])
        for statement in statements:
            parts = statement.format(c=inner + "    ", n=inner + indent).split("\n")
            rows += [blank.strip("\n") + inner + parts[0] if not blank else inner + parts[0]]
            rows[-1] += comment
            rows += parts[1:]
            if blank:
                rows += blank.strip("\n").split("\n")
        while rows and (not rows[-1].strip() or rows[-1].startswith("#")):
            rows.pop()
        return "\n".join(rows) + "\n"

    plain = text("    ", "", "", "", "")
    other = text(indent, outer, comment, blank, doc)
    assert fingerprint.of_source(other.replace("\n", newline)) == fingerprint.of_source(plain)


def _code(node: ast.AST) -> str:
    """The syntax tree without docstrings."""
    for inner in ast.walk(node):
        if isinstance(inner, source.Definition) and ast.get_docstring(inner) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
    return ast.dump(node)


@given(modules(), modules())
@QUICK
def test_equal_fingerprints_mean_equal_code(one: Module, two: Module) -> None:
    """What the fingerprint leaves out is no code: equal ones have equal syntax trees."""
    texts = []
    for module in (one, two):
        try:
            tree = ast.parse(module.data)
        except (SyntaxError, ValueError):
            return
        found = source.find(tree, module.symbol)
        if len(found) != 1:
            return
        texts.append((pin(module.data, module.symbol), _code(found[0])))
    (print_one, code_one), (print_two, code_two) = texts
    if print_one == print_two:
        assert code_one == code_two


# -- edits of calls, signatures and statements, applied and taken back ----------------------------

_POSITIONAL = ("x", "'é, )'", "f(1, x=2)", "[y,\n 2]")
_KEYWORDS = ("a=x", "b='x, b=1'", "c=f(\n  c=1)", "d=lambda c: c")
_STATEMENTS_OF_A_MODULE = {
    "LIMIT": ("LIMIT = 1", "LIMIT: int = (\n  1\n)", "LIMIT = f(x, limit=1)  # as it is"),
    "FLAG": (
        "try:\n    import one  # why\n    FLAG = 1\nexcept ImportError:\n    FLAG = 0",
        "if x:\n    FLAG = 1\n\n    # no\nelse:\n    FLAG = 0",
    ),
    "import.path": ("from os import path", "from os import (\n    path,  # why\n    sep,\n)"),
}


@dataclass(frozen=True)
class Change:
    """A text, an edit of it in the code of a page, and what the text must become."""

    before: str
    symbol: str
    edit: str
    old: str
    """The part of the text in which alone something may change."""
    tree: str
    """The syntax tree of the result."""


@st.composite
def listed(draw: st.DrawFn, items: list[str]) -> str:
    """Items of a list with commas, on one line or on several."""
    comma = draw(st.sampled_from((", ", ",", " ,  ", ",\n    ", ",  # why\n  ")))
    last = draw(st.sampled_from(("", ",", ",  # why\n"))) if items else ""
    return draw(st.sampled_from(("", " ", "\n    "))) + comma.join(items) + last


@st.composite
def changes(draw: st.DrawFn) -> Change:
    """One edit of a call, a signature or a statement, in some module."""
    kind = draw(st.sampled_from(("argument", "deletion", "parameter", "statement")))
    top = [text for text in _FILLER if "\f" not in text]
    filler = [_lines(draw(st.lists(st.sampled_from(top), max_size=2))) for _ in range(2)]
    head, tail = ("".join(f"{line.lstrip(_ZERO)}\n" for line in lines) for lines in filler)
    if kind == "statement":
        symbol = draw(st.sampled_from(tuple(_STATEMENTS_OF_A_MODULE)))
        old = draw(st.sampled_from(_STATEMENTS_OF_A_MODULE[symbol]))
        where = draw(st.sampled_from(("before", "after")))
        edit = f"inserting('new = 0', {where}={old!r})"
        new = f"new = 0\n{old}" if where == "before" else f"{old}\nnew = 0"
        return Change(f"{head}{old}\n{tail}", symbol, edit, old, f"{head}{new}\n{tail}")
    if kind == "parameter":
        names = ["a=1", "b: int = 2", "c=(3,\n 4)"][: draw(st.integers(0, 3))]
        items = [*names, *(["*", "d=4"] if draw(st.booleans()) else [])]
        places = [at for at, item in enumerate(items) if item != "*"]
    else:
        items = draw(st.lists(st.sampled_from(_POSITIONAL), max_size=2))
        first = len(items)
        items += draw(st.lists(st.sampled_from(_KEYWORDS), unique=True, max_size=3))
        places = list(range(first, len(items)))
    place = draw(st.sampled_from(places)) if places else None
    if kind == "deletion":
        gone = place if place is not None else len(items)
        items += ["z=0"] if place is None else []
        edit, new = f"replacing({items[gone]!r}, '')", items[:gone] + items[gone + 1 :]
    else:
        call = "adding_argument('g', 'new=1'" if kind == "argument" else "adding_parameter('new=1'"
        after, at = draw(st.booleans()), len(items)
        if place is not None and draw(st.booleans()):
            name = re.split(r"\W", items[place])[0]
            call, at = f"{call}, {'after' if after else 'before'}={name!r}", place + after
        edit, new = f"{call})", [*items[:at], "new=1", *items[at:]]
    text = draw(listed(items))
    if kind == "parameter":
        old, right = f"def t({text}):", f"def t({', '.join(new)}):"
    else:
        lines = draw(st.sampled_from(("g({})", "x = [g({}),  # é\n y]", "if g({}): pass")))
        old, right = (f"def t(f=1):\n    {lines.format(a)}" for a in (text, ", ".join(new)))
    body = "\n    # last\n    return 1\n"
    return Change(f"{head}{old}{body}{tail}", "t", edit, old, f"{head}{right}{body}{tail}")


@pytest.fixture(scope="module")
def tried() -> Iterator[Lab]:
    folder = Path(tempfile.mkdtemp(prefix="cppmega-property-"))
    with pytest.MonkeyPatch.context() as patch:
        yield Lab(folder, patch)
    shutil.rmtree(folder)


@given(change=changes(), newline=st.sampled_from(("\n", "\r\n")))
@QUICK
def test_edit_changes_its_place_and_can_be_taken_back(
    tried: Lab, change: Change, newline: str
) -> None:
    shutil.rmtree(tried.root, ignore_errors=True)
    names = "f = g = x = y = payload = None\n"
    before = (names + change.before).replace("\n", newline)
    tried.files = {**FILES, A: before.encode()}
    tried.page(target=f"{A}:{change.symbol}", edit=change.edit, reached="never")
    tried.wheel()
    assert tried.apply().ok, change
    text = _OURS.sub("", (tried.root / A).read_bytes().decode())
    assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(names + change.tree)), change
    start = before.index(change.old.replace("\n", newline))
    assert text.startswith(before[:start]), change
    assert text.endswith(before[start + len(change.old.replace("\n", newline)) :]), change
    assert not tried.apply().changed
    assert tried.revert().ok
    tried.pristine()


# -- the whole engine on damaged files ------------------------------------------------------------


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    folder = Path(tempfile.mkdtemp(prefix="cppmega-property-"))
    with pytest.MonkeyPatch.context() as patch:
        made = Lab(folder, patch)
        made.page(feature=(f"{A}:Layer",), fixed=f'"2 * x" in source.text({TARGET!r})')
        made.page("tail", f"{A}:tail", 'replacing("str(x)", "repr(x)")')
        yield made
    shutil.rmtree(folder)


@given(
    at=st.integers(0, len(FILES[A])),
    cut=st.integers(0, 40),
    put=st.one_of(
        st.binary(max_size=12),
        st.sampled_from(
            (b"\n", b"\r", b"#", b"'''", b"def double(x): pass\n", b"\\", b"\xef\xbb\xbf")
        ),
    ),
    vouched=st.booleans(),
)
@QUICK
def test_damaged_file_has_an_honest_state(
    lab: Lab, at: int, cut: int, put: bytes, vouched: bool
) -> None:
    """Any bytes cut and put anywhere: known text is patched and can be taken back exactly; for
    everything else there is a state that fails, and no byte is written."""
    shutil.rmtree(lab.root, ignore_errors=True)
    data = FILES[A][:at] + put + FILES[A][at + cut :]
    lab.files = {**FILES, A: FILES[A] if vouched else data}
    lab.wheel() if vouched else lab.export()
    (lab.root / A).write_bytes(data)
    before = snapshot(lab.root)
    try:
        outcome = lab.apply()
    except CppmegaError:
        assert snapshot(lab.root) == before
        return
    states = {v.state for v in outcome.verdicts}
    if vouched and data != FILES[A]:
        assert not outcome.ok
    if not outcome.ok:
        assert outcome.plan.failures and snapshot(lab.root) == before
        return
    if "applied" in states:
        for name, symbol in (("page", "double"), ("tail", "tail")):
            if outcome.plan.verdicts[name].state == "applied":
                assert pin(data, symbol) == pin(FILES[A], symbol)
        assert _rest(data) == _rest((lab.root / A).read_bytes())
    assert lab.revert().ok
    assert snapshot(lab.root) == before


def _rest(data: bytes) -> str:
    """The syntax tree without targets and marks."""
    tree = ast.parse(data)
    gone = ("double", "tail", marks.FUNCTION)
    tree.body = [
        node
        for node in tree.body
        if getattr(node, "name", None) not in gone and marks.FLAGS not in ast.dump(node)
    ]
    return ast.dump(tree)
