"""Write a page with plots and tables, such as the report of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import printable
from paceline.observe.dashboard import make_report
from paceline.output_files import naming_output, replacing


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line of a plot."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: int
    """The number of the color; equal numbers have equal colors."""
    is_dashed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A plot of one or more series."""

    title: str
    x_label: str
    series: Sequence[Series]
    format: Literal["percent", "count", "number"]
    """The format of the vertical axis. For ``number`` it begins at the least value, otherwise at 0."""
    is_log: bool = False
    """Whether the horizontal axis is logarithmic."""
    note: str = ""
    kind: Literal["plot"] = "plot"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """A table, whose first column is a name."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    kind: Literal["table"] = "table"


def page_bytes(title: str, status: str, sections: Sequence[Plot | PageTable]) -> bytes:
    """Return a page that needs no other file. `status` is a remark beside the title."""
    return make_report({"title": printable(title), "status": status, "sections": sections})


def write_page(option: str, path: Path, page: bytes) -> None:
    """Write the page of an option such as ``--report``. Raises UsageError if the file cannot be written."""
    with naming_output(option, path), replacing(path) as aside:
        aside.write_bytes(page)
