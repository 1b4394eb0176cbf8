"""Describe a cut graph as text, and draw it as SVG. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

from paceline.torch.partitioning.graph import CALLER, CutGraph, GraphSegment

_NUM_NAMES: Final = 6
"""Maximum number of operations that are shown for a segment. If there are more, show the first five and the last."""


def describe_cut(cut: CutGraph, titles: Sequence[str], shapes: Mapping[str, str]) -> str:
    """Return the cut graph as text. `titles` has one line per device, `shapes` the shape of each value as text."""
    lines = []
    for device, title in enumerate(titles):
        lines.append(title)
        for number, segment in enumerate(cut.segments):
            if segment.device != device:
                continue
            lines.append(f"  segment {number}: {_names(segment)}")
            arriving = {transfer.value: transfer for transfer in cut.transfers if transfer.destination == device}
            lines += [
                f"    receives {_value(value, shapes)} from {_place(arriving[value].source)}"
                for value in segment.inputs
                if value in arriving
            ]
            lines += [
                f"    sends {_value(transfer.value, shapes)} to {_place(transfer.destination)}"
                for transfer in cut.transfers
                if transfer.value in segment.outputs
            ]
    num_sent = sum(transfer.source != CALLER for transfer in cut.transfers)
    lines.append(
        f"{num_sent} {'transfer' if num_sent == 1 else 'transfers'} between devices in a forward; in backward, "
        "the gradient of each value is sent back, if the value has a gradient"
    )
    return "\n".join(lines)


def _names(segment: GraphSegment) -> str:
    names = segment.operations
    if len(names) > _NUM_NAMES:
        names = (*names[: _NUM_NAMES - 1], "…", names[-1])
    return ", ".join(names)


def _value(name: str, shapes: Mapping[str, str]) -> str:
    shape = shapes.get(name)
    return f"{name} ({shape})" if shape else name


def _place(device: int) -> str:
    return "the caller" if device == CALLER else f"device {device}"


_COLUMN, _ROW, _HEAD = 300, 92, 44
_BOX_WIDTH, _BOX_HEIGHT = 230, 40
_LETTERS: Final = 36
"""Number of letters that fit into a box."""


def draw_cut(cut: CutGraph, titles: Sequence[str], shapes: Mapping[str, str]) -> str:
    """Return an SVG with one column for the caller and one per device. A segment is below the segments it waits for."""
    rows = find_rows(cut.segments)
    boxes = {number: (segment.device, rows[number]) for number, segment in enumerate(cut.segments)}
    boxes[CALLER] = (CALLER, 0)
    arguments = ", ".join(dict.fromkeys(transfer.value for transfer in cut.transfers if transfer.source == CALLER))
    width, height = _COLUMN * (len(titles) + 1), _HEAD + _ROW * (max(rows, default=0) + 1)
    content = [
        _text(_middle(device), 20, title, bold=True) for device, title in enumerate(["the caller", *titles], CALLER)
    ]
    content += [
        f'<line x1="{_COLUMN * number}" y1="0" x2="{_COLUMN * number}" y2="{height}" stroke="#ddd"/>'
        for number in range(1, len(titles) + 1)
    ]
    for (source, target), values in _find_edges(cut).items():
        content += _draw_edge(boxes[source], boxes[target], values, shapes)
    content += _draw_box((CALLER, 0), "arguments", arguments, shapes, [])
    for number, segment in enumerate(cut.segments):
        content += _draw_box(boxes[number], f"segment {number}", _names(segment), shapes, segment.operations)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="11">\n'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#4a7ebb"/></marker></defs>\n'
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(content) + "\n</svg>\n"
    )


def find_rows(segments: Sequence[GraphSegment]) -> list[int]:
    """Return the row of each segment in the drawing, from 1.

    A segment is below all segments for which it waits. A row has at most one segment of each device.
    """
    rows: list[int] = []
    occupied: set[tuple[int, int]] = set()
    for segment in segments:
        row = max((rows[earlier] for earlier in segment.waits_for), default=0) + 1
        while (segment.device, row) in occupied:
            row += 1
        occupied.add((segment.device, row))
        rows.append(row)
    return rows


def _find_edges(cut: CutGraph) -> dict[tuple[int, int], list[str]]:
    """Return the values sent between each pair of segments; an empty list if the second just waits for the first."""
    maker = {value: number for number, segment in enumerate(cut.segments) for value in segment.outputs}
    edges: dict[tuple[int, int], list[str]] = {}
    for number, segment in enumerate(cut.segments):
        for earlier in segment.waits_for:
            edges[earlier, number] = []
        for value in segment.inputs:
            edges.setdefault((maker.get(value, CALLER), number), []).append(value)
    return edges


def _middle(device: int) -> float:
    return _COLUMN * (device + 1.5)


def _draw_edge(
    source: tuple[int, int], target: tuple[int, int], values: Sequence[str], shapes: Mapping[str, str]
) -> list[str]:
    (from_device, from_row), (to_device, to_row) = source, target
    x1, y1 = _middle(from_device), _HEAD + _ROW * from_row + _BOX_HEIGHT
    x2, y2 = _middle(to_device), _HEAD + _ROW * to_row
    if from_device == to_device:
        return [f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#999"/>']
    style = 'stroke="#4a7ebb"' if values else 'stroke="#999" stroke-dasharray="4 3"'
    curve = f"M{x1} {y1} C{x1} {y1 + _ROW / 2} {x2} {y2 - _ROW / 2} {x2} {y2}"
    label = _shortened(", ".join(values))
    return [
        f'<path d="{curve}" fill="none" {style} marker-end="url(#tip)"><title>{_values(values, shapes)}</title></path>',
        _text((x1 + x2) / 2, (y1 + y2) / 2 - 4, label, color="#4a7ebb"),
    ]


def _draw_box(
    place: tuple[int, int], title: str, names: str, shapes: Mapping[str, str], operations: Sequence[str]
) -> list[str]:
    device, row = place
    x, y = _middle(device) - _BOX_WIDTH / 2, _HEAD + _ROW * row
    return [
        f'<g><title>{_values(operations, shapes)}</title><rect x="{x}" y="{y}" width="{_BOX_WIDTH}" '
        f'height="{_BOX_HEIGHT}" rx="4" fill="#f4f6fa" stroke="#4a7ebb"/></g>',
        _text(_middle(device), y + 16, title, bold=True),
        _text(_middle(device), y + 31, _shortened(names)),
    ]


def _values(names: Sequence[str], shapes: Mapping[str, str]) -> str:
    return escape("\n".join(_value(name, shapes) for name in names))


def _shortened(text: str) -> str:
    return text if len(text) <= _LETTERS else text[: _LETTERS - 1] + "…"


def _text(x: float, y: float, text: str, *, color: str = "#333", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" text-anchor="middle" fill="{color}"{weight}>{escape(text)}</text>'
