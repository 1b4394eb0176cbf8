"""``make figures`` fills blocks of pages with the output of their commands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from benchmarks import figures, plots
from tests.pages import PAGES, ROOT

NOT_PROSE = re.compile(
    r"<!-- (?:figures|plot|screenshot).*?<!-- end of figures -->|<!--.*?-->|^( *)```.*?^\1```|`[^`]+`",
    re.DOTALL | re.MULTILINE,
)
"""Blocks of ``make figures``, comments, and code with its output."""
FIGURE = re.compile(
    r"\d[\d,.]* ?(?:(?:ns|µs|ms|s|[MG]B/s|[a-z]+/s)\b|×|%|times as )|(?:AUC|loss|accuracy)[^.|]{0,20} 0\.\d\d"
)
"""A time, a rate, a ratio or a metric."""
SETTING = re.compile(
    r"timeout|targets|https://|\(\d+ s\b[^)]*\)"
    r"|(?:at most|at least|up to|more than|within|every|after|allows|with|runs|and) (?:about )?\d"
)
"""Words of sentences about limits, defaults, goals, or sources with a link."""


def measured_figures(text: str) -> list[str]:
    """Return the sentences and table rows of a page that have a measured figure outside the blocks."""
    sentences = re.split(r"(?<=[.;])\s+|\n\n|\n(?=[|-])", NOT_PROSE.sub("", text))
    return [sentence for sentence in sentences if FIGURE.search(sentence) and not SETTING.search(sentence)]


def test_a_block_is_replaced_by_the_output_of_its_command(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- figures: show echo 1 -->\nold\n<!-- end of figures -->\nAfter.\n")
    assert figures.fill(page, "", str(tmp_path)) == []
    text = page.read_text()
    assert text.startswith("Before.\n<!-- figures: show echo 1 -->\n```console\n$ echo 1\n1\n```\n\nCommit ")
    assert text.endswith("<!-- end of figures -->\nAfter.\n")
    assert "old" not in text


def test_a_block_is_unchanged_if_the_command_fails_or_is_not_selected(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "<!-- figures: exit 3 -->\nold\n<!-- end of figures -->\n"
    page.write_text(text)
    assert figures.fill(page, "another", str(tmp_path)) == []
    assert figures.fill(page, "", str(tmp_path)) == ["exit 3 (status 3)"]
    assert page.read_text() == text


def test_plots(tmp_path: Path) -> None:
    rows: dict[str, plots.Rows] = {
        "push_and_pull": [{"work": "push", "dim": 1, "keys": n, "median_us": n, "floor_us": 1} for n in (1, 10)],
        "all_reduce": [{"peer": "gloo", "bytes": n, "median_us": n} for n in (1, 10)],
        "staleness_and_speed": [{"consistency": "eventual", "staleness": {"mean": 1.0}, "examples_per_s": 5}],
    }
    page = tmp_path / "page.md"
    for name, lines in rows.items():
        (tmp_path / "rows").write_text("\n".join(map(json.dumps, lines)))
        page.write_text(f"<!-- plot {name}: cat {tmp_path}/rows -->\n<!-- end of figures -->\n")
        assert figures.fill(page, "", str(tmp_path)) == []
        assert f"({name}.svg)" in page.read_text()
        assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")


@pytest.mark.skipif(figures.find_browser() is None, reason="there is no Chromium")
def test_screenshots(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- screenshot shown: echo '<h1>A page' > $PAGE -->\n<!-- end of figures -->\n")
    assert figures.fill(page, "", str(tmp_path)) == []
    assert "![shown](shown.png)" in page.read_text()
    assert (tmp_path / "shown.png").read_bytes().startswith(b"\x89PNG")


def test_screenshots_without_a_browser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    page = tmp_path / "page.md"
    text = "<!-- screenshot shown: exit 3 -->\nold\n<!-- end of figures -->\n"
    page.write_text(text)
    assert figures.fill(page, "", str(tmp_path)) == []
    assert page.read_text() == text
    assert "no picture of the page of 'exit 3', because Chromium is not installed" in capsys.readouterr().out


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_of_figures_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for _, kind, name, command, _ in figures.BLOCK.findall(text):
        assert bool(name) == (kind != "figures")
        assert kind != "plot" or name in plots.PLOTS
        assert all((ROOT / script).exists() for script in re.findall(r"(?:benchmarks|examples)/\w+\.py", command))
    assert len(figures.BLOCK.findall(text)) == text.count("<!-- end of figures -->") - text.count(
        "<!-- figures of make gpu"
    )


def test_measured_figures_are_found() -> None:
    block = "<!-- figures: show echo 1 -->\nIt took 5 ms.\n<!-- end of figures -->\n"
    for sentence in ("The median was 16 ms.", "It is 1.9× slower.", "| train | 5 rows/s |", "The AUC is 0.7593."):
        assert measured_figures(f"First.\n\n{sentence}\n\n{block}") == [sentence]
    for sentence in ("It waits up to 60 s.", "The default timeout is 10 s.", "Run `sleep 5 s`."):
        assert measured_figures(sentence) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_measured_figures_are_in_blocks(path: Path) -> None:
    assert measured_figures(path.read_text(encoding="utf-8")) == []
