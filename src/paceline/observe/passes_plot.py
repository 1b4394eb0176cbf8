"""Plot a solver's passes: the distance of the objective from its minimum, and the share of active columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 360, 70, 60, 30, 50
_OBJECTIVE: Final = "#4a7ebb"
_ACTIVE: Final = "#c0504d"


def draw_passes(objectives: Sequence[float], active: Sequence[float]) -> str:
    """Return an SVG with the objective's relative distance from its minimum, and the active columns, by pass.

    The left axis shows the distance on a logarithmic scale, the right axis the share of active columns, from 0 to 1.
    Passes at the minimum have no point.
    """
    least = min(objectives)
    gaps = [(objective - least) / max(abs(least), 1e-300) for objective in objectives]
    logs = [math.log10(gap) if gap > 0 else None for gap in gaps]
    known = [gap_log for gap_log in logs if gap_log is not None]
    low, high = (math.floor(min(known)), math.ceil(max(known))) if known else (-1, 0)
    high = max(high, low + 1)
    width = max(len(objectives) - 1, 1)

    def x(number: int) -> float:
        return round(_LEFT + number / width * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(share: float) -> float:
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)

    left = [f"{x(i)},{y((gap_log - low) / (high - low))}" for i, gap_log in enumerate(logs) if gap_log is not None]
    right = [f"{x(i)},{y(share)}" for i, share in enumerate(active)]
    step = max(1, (high - low) // 6)
    content = [
        *(_text(_LEFT - 6, y((at - low) / (high - low)) + 4, f"1e{at}", "end") for at in range(low, high + 1, step)),
        *(_text(_WIDTH - _RIGHT + 6, y(share) + 4, f"{share:.0%}", "start") for share in (0.0, 0.5, 1.0)),
        *(_text(x(at), _HEIGHT - _BOTTOM + 16, f"{at + 1}") for at in sorted({0, len(objectives) - 1})),
        _text(_WIDTH / 2, _HEIGHT - 12, "pass"),
        _text(_LEFT, 18, "relative distance of the objective from its minimum", "start", _OBJECTIVE),
        _text(_WIDTH - _RIGHT, 18, "active columns", "end", _ACTIVE),
        f'<polyline fill="none" stroke="{_OBJECTIVE}" stroke-width="1.5" points="{" ".join(left)}"/>',
        f'<polyline fill="none" stroke="{_ACTIVE}" stroke-width="1.5" points="{" ".join(right)}"/>',
    ]
    frame = f'x="{_LEFT}" y="{_TOP}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_HEIGHT - _TOP - _BOTTOM}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="11"><rect {frame} fill="#fafafa" stroke="#999"/>\n'
        + "\n".join(content)
        + "\n</svg>\n"
    )


def _text(x: float, y: float, text: str, anchor: str = "middle", color: str = "#444") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}">{text}</text>'
