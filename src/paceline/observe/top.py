"""Show the figures of a running command in the terminal. ``paceline top`` requests them from the dashboard."""

from __future__ import annotations

import time
from collections.abc import Sequence
from http.client import HTTPException, HTTPResponse
from typing import Any, Final
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from paceline.decoded_types import register_type
from paceline.errors import PeerError, UsageError, printable
from paceline.observe.collector import SILENT_S
from paceline.observe.table import draw_bars, format_bytes, format_count, format_duration, format_rate

_EVERY_S: Final = 1.0
_TIMEOUT_S: Final = 5.0
_MOST_BYTES: Final = 1 << 26
_MOST_CHARS: Final = 300
_MOST_FAILURES: Final = 3
"""After this number of failed requests one after another, the run has ended."""
_SPARK_CELLS: Final = 24
_BAR_CELLS: Final = 20
_FILLS: Final = {
    "data": ("░", "magenta"),
    "forward": ("▒", "bright_blue"),
    "backward": ("▓", "blue"),
    "compute": ("▓", "blue"),
    "communication": ("·", "yellow"),
    "optimizer": ("=", "green"),
    "other": ("-", "bright_black"),
}
"""The character and the color of each phase in a bar."""
_HEADER_LINES: Final = 11
_EVENTS_SHOWN: Final = 3
_ALL_RANKS: Final = 1 << 16

_opener = build_opener(ProxyHandler({}))  # no proxy receives the token


def fetch_state(url: str) -> dict[str, Any]:
    """Return the figures that a dashboard at `url` serves.

    Raises UsageError for an address without scheme or with a wrong token, and PeerError if no dashboard answers there.
    """
    url = printable(url, _MOST_CHARS)
    try:
        parts = urlsplit(url)
        is_address = parts.scheme == "http" and bool(parts.netloc)
    except ValueError:  # such as "http://[", an address over IPv6 without an end
        is_address = False
    if not is_address:
        raise UsageError(f"{url}: expected the address that --dashboard has printed, http://HOST:PORT/?token=TOKEN")
    try:
        with _opener.open(f"http://{parts.netloc}/state?{parts.query}", timeout=_TIMEOUT_S) as answer:
            found: dict[str, Any] = msgspec.json.decode(_read(answer), type=register_type(dict[str, Any]))
            return found
    except HTTPError as error:
        error.close()
        if error.code == 403:
            raise UsageError(f"{url}: wrong token. Pass the whole address that --dashboard has printed") from None
        raise PeerError(f"{url}: there is no dashboard (HTTP status {error.code})") from None
    except (OSError, HTTPException, msgspec.MsgspecError) as error:
        reason = getattr(error, "reason", error)
        raise PeerError(f"no dashboard answers at {url}: {getattr(reason, 'strerror', None) or reason}") from None


def _read(answer: HTTPResponse) -> bytes:
    """Return the content. Raises TimeoutError if it is too long, or does not arrive in time."""
    content, deadline = bytearray(), time.monotonic() + _TIMEOUT_S
    while chunk := answer.read1(_MOST_BYTES):
        content += chunk
        if len(content) > _MOST_BYTES or time.monotonic() > deadline:
            raise TimeoutError(f"no complete answer within {_TIMEOUT_S:.0f} s and {_MOST_BYTES >> 20} MiB")
    return bytes(content)


def show_top(url: str, console: Console) -> None:
    """Show the figures until the run ends or Ctrl-C. Without a terminal, print them once."""
    state = fetch_state(url)
    if not console.is_terminal:
        console.print(_draw_answer(url, state, console))
        return
    num_failures = 0
    with Live(console=console, screen=False, auto_refresh=False) as live:
        while True:
            live.update(_draw_answer(url, state, console), refresh=True)
            if state["has_ended"]:
                return
            time.sleep(_EVERY_S)
            try:
                state, num_failures = fetch_state(url), 0
            except PeerError:
                num_failures += 1
                state = {**state, "has_ended": num_failures >= _MOST_FAILURES}


def _draw_answer(url: str, state: dict[str, Any], console: Console) -> RenderableType:
    try:
        room = console.height - _HEADER_LINES - _EVENTS_SHOWN - len(state.get("servers", ()))
        return draw(state, console.width, most_ranks=max(room, 3) if console.is_terminal else _ALL_RANKS)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        raise PeerError(
            f"{printable(url, _MOST_CHARS)}: the answer is not that of a dashboard of this version of Paceline. Pass "
            "the address that --dashboard has printed"
        ) from None


def draw(state: dict[str, Any], width: int, most_ranks: int) -> RenderableType:
    """Return the figures for a terminal of `width` cells.

    It shows at most `most_ranks` ranks: first the silent ranks, then the ranks for which others wait.
    """
    status = "ended after" if state["has_ended"] else "running for"
    parts: list[RenderableType] = [
        Text(printable(str(state["title"]), _MOST_CHARS), style="bold", overflow="ellipsis", no_wrap=True),
        Text(f"{status} {format_duration(state['seconds'])}{printable(_describe_cluster(state), _MOST_CHARS)}"),
    ]
    if state.get("alarm") and not state["has_ended"]:
        parts.append(Text(printable(state["alarm"], _MOST_CHARS), style="bold red"))
    series = state["series"]
    for name, label, show in (
        ("examples_per_s", "examples", format_rate),
        ("loss", "loss", "{:.4g}".format),
        ("staleness", "staleness", "{:.1f}".format),
        ("bytes_per_s", "exchanged", lambda value: f"{format_bytes(value)}/s"),
        ("memory_bytes", "memory", format_bytes),
    ):
        known = [value for value in series[name] if value is not None]
        if any(known):
            parts.append(Text(f"{label:10}{_draw_sparks(known)}  {show(known[-1])}"))
    if state.get("ranks"):
        parts += _draw_ranks(state, width, most_ranks)
    if state.get("servers"):
        parts.append(_draw_servers(state["servers"]))
    for seconds, text in state["events"][-_EVENTS_SHOWN:]:
        line = f"{format_duration(seconds)}  {printable(text, _MOST_CHARS)}"
        parts.append(Text(line, style="dim", overflow="ellipsis", no_wrap=True))
    return Group(*parts)


def _describe_cluster(state: dict[str, Any]) -> str:
    facts = [
        f"{format_count(int(count))} {role.removesuffix('s') if count == 1 else role}"
        for role, count in state.get("members", {}).items()
    ]
    if state.get("epoch") is not None:
        facts.append(f"view {state['epoch']:.0f}")
    if state.get("done") is not None:
        facts.append(f"{state['done']:.0%} done")
    return "".join(f", {fact}" for fact in facts)


def _draw_sparks(values: Sequence[float]) -> str:
    recent = values[-_SPARK_CELLS:]
    return draw_bars(recent, min(recent), max(recent)).rjust(_SPARK_CELLS)


def _draw_ranks(state: dict[str, Any], width: int, most_ranks: int) -> list[RenderableType]:
    waited = {entry["rank"]: entry["total"] for entry in state["waited_for"]}
    is_running = not state["has_ended"]

    def urgency(rank: dict[str, Any]) -> tuple[bool, float]:
        return is_running and rank["last_seen_s"] > SILENT_S, waited.get(rank["rank"], 0.0)

    ranks = sorted(state["ranks"], key=urgency, reverse=True)[:most_ranks]
    left_out = len(state["ranks"]) - len(ranks)
    table = _start_table("rank", "examples", "step", "waited for", "memory", "seen")
    table.caption = f"{left_out} more ranks" if left_out else None
    phases = [phase for phase in state["phases"] if any(rank["phases"].get(phase, 0) > 0.001 for rank in ranks)]
    has_bars = bool(phases) and width >= 76
    if has_bars:
        table.add_column("phases", no_wrap=True)
    for rank in sorted(ranks, key=lambda rank: int(rank["rank"])):
        bar = Text()
        for phase in phases:
            fill, color = _FILLS[phase]
            bar.append(fill * round(_BAR_CELLS * rank["phases"].get(phase, 0.0)), color)
        step, memory, seen_s = rank["step_s"], rank["memory_bytes"], rank["last_seen_s"]
        cells: list[RenderableType] = [
            str(rank["rank"]),
            format_rate(rank["examples_per_s"]),
            "" if step is None else f"{1e3 * step:.3g} ms",
            f"{waited[rank['rank']]:.2f} s/s" if rank["rank"] in waited else "",
            "" if memory is None else format_bytes(memory),
            Text(f"{seen_s:.0f} s", style="bold red" if seen_s > SILENT_S and is_running else ""),
        ]
        table.add_row(*cells, *([bar] if has_bars else []))
    legend = Text.assemble(
        *(part for phase in phases for part in ((f"{_FILLS[phase][0]} {phase}", _FILLS[phase][1]), "  "))
    )
    return [table, legend] if has_bars else [table]


def _draw_servers(servers: Sequence[dict[str, Any]]) -> Table:
    table = _start_table("server", "rows", "memory", "traffic", "held")
    for server in servers:
        table.add_row(
            str(server["server"]),
            format_count(int(server["rows"])),
            format_bytes(server["memory_bytes"]),
            f"{format_bytes(server['bytes_per_s'])}/s",
            "" if server["held"] is None else f"{server['held']:.0f}",
        )
    return table


def _start_table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table
