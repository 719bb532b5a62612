"""The packages of cppmega and their imports as a picture that needs no script of another site."""

from __future__ import annotations

from collections.abc import Sequence

from architecture import Graph, arrows

_WIDTH, _ROW, _BOX, _GAP, _LETTER = 960, 74, 26, 14, 7.4
"""Of the picture, a row, a box's height, between boxes, and of a letter; in pixels."""

Place = tuple[float, float, float]
"""The middle of a box, its upper edge, and its width."""


def svg() -> str:
    """The picture: who imports is above what is imported. Markdown leaves a `div` as it is."""
    graph = arrows()
    places = _places(_rows(graph))
    height = max(top for _, top, _ in places.values()) + _BOX + _GAP
    lines = [_line(places[room], places[to]) for room in graph for to in sorted(graph[room])]
    boxes = [_box(room, place) for room, place in places.items()]
    head = (
        f'<div class="architecture"><svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" '
        'aria-label="The packages and their imports" xmlns="http://www.w3.org/2000/svg">'
    )
    return "\n".join([head, *lines, *boxes, "</svg></div>"])


def _rows(graph: Graph) -> list[list[str]]:
    """The packages by their longest way down, the top first, each near what it imports."""

    def depth(room: str) -> int:
        return 1 + max((depth(to) for to in graph[room]), default=-1)

    rows: list[list[str]] = [[] for _ in range(1 + max(map(depth, graph)))]
    for room in sorted(graph):
        rows[depth(room)].append(room)
    at: dict[str, float] = {}
    for row in rows:
        middles = {room: _mean([at[to] for to in graph[room]]) for room in row}
        row.sort(key=lambda room: (middles[room], room))
        at |= {room: (place + 0.5) / len(row) for place, room in enumerate(row)}
    return rows[::-1]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.5


def _places(rows: Sequence[Sequence[str]]) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for level, row in enumerate(rows):
        widths = [2 * _GAP + _LETTER * len(room) for room in row]
        free = (_WIDTH - sum(widths)) / len(row)
        left = free / 2
        for room, width in zip(row, widths, strict=True):
            places[room] = (left + width / 2, _GAP / 2 + level * _ROW, width)
            left += width + free
    return places


def _line(start: Place, end: Place) -> str:
    (x, top, _), (to_x, to_top, _) = start, end
    y, bend = top + _BOX, (to_top - top - _BOX) / 2
    path = f"M{x:.0f} {y:.0f} C{x:.0f} {y + bend:.0f} {to_x:.0f} {to_top - bend:.0f}"
    return f'<path d="{path} {to_x:.0f} {to_top:.0f}"/>'


def _box(room: str, place: Place) -> str:
    x, top, width = place
    corner = f'x="{x - width / 2:.0f}" y="{top:.0f}" width="{width:.0f}" height="{_BOX}"'
    return f'<rect {corner} rx="4"/><text x="{x:.0f}" y="{top + _BOX / 2:.0f}">{room}</text>'
