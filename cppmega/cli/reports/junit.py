"""JUnit XML, which CI systems show as a list of tests."""

from __future__ import annotations

import re
from collections import Counter
from xml.etree import ElementTree as Xml

from cppmega.cli.reports.entries import Entry, Report

_ELEMENTS = {"failed": "failure", "error": "error", "skipped": "skipped"}
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot contain, not even escaped."""


def written(report: Report) -> str:
    """One test case for each entry."""
    counts = Counter(_ELEMENTS.get(entry.result) for entry in report.entries)
    totals = {
        "tests": str(len(report.entries)),
        "failures": str(counts["failure"]),
        "errors": str(counts["error"]),
        "skipped": str(counts["skipped"]),
        "time": _seconds(sum(entry.seconds for entry in report.entries)),
    }
    suites = Xml.Element("testsuites", totals)
    suite = Xml.SubElement(suites, "testsuite", {"name": f"cppmega {report.command}", **totals})
    for entry in report.entries:
        _add_case(suite, entry, report.command)
    Xml.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + Xml.tostring(suites, "unicode") + "\n"


def _add_case(suite: Xml.Element, entry: Entry, command: str) -> None:
    about = {
        "classname": f"cppmega.{command}",
        "name": plain(entry.name),
        "time": _seconds(entry.seconds),
    }
    case = Xml.SubElement(suite, "testcase", about)
    element = _ELEMENTS.get(entry.result)
    if element is not None:
        summary = entry.message.partition("\n")[0] or entry.rule
        why = Xml.SubElement(case, element, {"type": entry.rule, "message": plain(summary)})
        why.text = plain(entry.text)
    elif entry.message:
        Xml.SubElement(case, "system-out").text = plain(entry.text)


def plain(text: str) -> str:
    """Write characters that XML cannot contain as Python escapes."""
    return _NOT_XML.sub(lambda match: ascii(match[0])[1:-1], text)


def _seconds(value: float) -> str:
    return f"{value:.3f}"
