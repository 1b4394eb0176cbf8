"""Draw the plots of the docs from the JSON lines of benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

Rows = list[dict[str, Any]]


def draw_lines(lines: dict[str, list[tuple[float, float]]], x: str, y: str, path: Path) -> None:
    """Draw named lines of points on logarithmic axes, and write them as SVG."""
    mpl.rcParams["svg.hashsalt"] = "paceline"
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def push_and_pull(rows: Rows, path: Path) -> None:
    """Plot the time of push and pull against the number of keys, for dim 1, and the time of an echo of equal size."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["dim"] == 1 and row["work"] in {"push", "pull"}:
            lines.setdefault(row["work"], []).append((row["keys"], row["median_us"]))
            lines.setdefault(f"echo of the bytes of a {row['work']}", []).append((row["keys"], row["floor_us"]))
    draw_lines(lines, "keys", "µs", path)


def all_reduce(rows: Rows, path: Path) -> None:
    """Plot the time of all-reduce against its bytes, for each library."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(row["peer"], []).append((row["bytes"], row["median_us"]))
    draw_lines(lines, "bytes", "µs", path)


def staleness_and_speed(rows: Rows, path: Path) -> None:
    """Plot the speed against the mean staleness, for each consistency."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for row in rows:
        axes.scatter(row["staleness"]["mean"], row["examples_per_s"])
        axes.annotate(
            row["consistency"], (row["staleness"]["mean"], row["examples_per_s"]), (6, -3), textcoords="offset points"
        )
    axes.set(xlabel="mean staleness (updates)", ylabel="examples/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


PLOTS: dict[str, Callable[[Rows, Path], None]] = {
    "push_and_pull": push_and_pull,
    "all_reduce": all_reduce,
    "staleness_and_speed": staleness_and_speed,
}
"""The functions, by the name of the plot in the pages' markers."""
