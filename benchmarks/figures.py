"""Run the benchmarks behind the figures of the README and the docs, and write their output into the pages.

    make figures [ONLY=TEXT] [CRITEO=train.tsv.gz] [MNIST=DIRECTORY] [A9A=DIRECTORY]

A page has ``<!-- figures: COMMAND -->`` before a block and ``<!-- end of figures -->`` after it. The block becomes the
output of the command, with the commit, the machine and its load. ``<!-- plot NAME: COMMAND -->`` draws the JSON lines
of the command with ``benchmarks/plots.py`` as ``NAME.svg``. ``<!-- screenshot NAME: COMMAND -->`` draws the page that
the command writes to ``$PAGE`` with Chromium as ``NAME.png``; without Chromium, the picture stays unchanged. If a
command fails, its block stays unchanged and the exit status is 1. ``ONLY=TEXT`` runs only the commands that contain
TEXT.

In a command, ``show COMMAND`` prints the command before its output. ``$CRITEO``, ``$MNIST`` and ``$A9A`` are the paths
of the data. ``$DAYS`` is a directory with ``day1.tsv`` and ``day2.tsv``, from the Criteo sample or from a synthetic
log.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.plots import PLOTS

from paceline.data import ClickLogSpec, write_click_log

ROOT = Path(__file__).parents[1]
PATHS = ("CRITEO", "MNIST", "A9A")
"""The variables with paths of data, which the pages show instead of the paths."""
BLOCK = re.compile(r"(<!-- (figures|plot|screenshot)(?: (\w+))?: (.*?) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
SIZE = "1000,960"
"""Width and height of screenshots."""


def describe_run() -> str:
    """Return one line about the commit, the date, the machine and its load."""
    show = ["git", "show", "-s", "--format=%h of %cs", "HEAD"]
    commit = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    cpu = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpu.read_text()) if cpu.exists() else None
    machine = found[1] if found else platform.processor()
    return f"Commit {commit}; {os.cpu_count()} cores of {machine}; load {os.getloadavg()[0]:.1f} before the run."


def write_days(directory: Path, criteo: str | None) -> None:
    """Write ``day1.tsv`` (four fifths of Criteo's sample) and ``day2.tsv`` (the rest), or a synthetic log."""
    if criteo is None:
        write_click_log(directory / "day1.tsv", ClickLogSpec(rows=100_000), eval_path=directory / "day2.tsv")
        return
    lines = gzip.decompress(Path(criteo).read_bytes()).splitlines(keepends=True)
    (directory / "day1.tsv").write_bytes(b"".join(lines[: len(lines) * 4 // 5]))
    (directory / "day2.tsv").write_bytes(b"".join(lines[len(lines) * 4 // 5 :]))


def run(command: str, days: str) -> str:
    """Return the standard output of a command. Raises subprocess.CalledProcessError if it fails."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", f'show() {{ echo "\\$ $*"; "$@" 2>&1; }}; set -eu\n{command}'],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "DAYS": days},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    output = done.stdout.rstrip().strip("\n")
    for name in PATHS:
        if data := os.environ.get(name):
            output = output.replace(data, f"${name}")
    return output


def fill(page: Path, only: str, days: str) -> list[str]:
    """Replace the blocks of a page, and return the commands that failed."""
    failed: list[str] = []
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        opening, kind, name, command, end = block.groups()
        if only not in command:
            continue
        if kind == "screenshot" and find_browser() is None:
            print(f"{page.name}: no picture of the page of '{command}', because Chromium is not installed", flush=True)
            continue
        print(f"{page.name}: {command}", flush=True)
        about = describe_run()
        try:
            with tempfile.TemporaryDirectory() as folder:
                output = run(f"PAGE={folder}/page.html; {command}" if kind == "screenshot" else command, days)
                if kind == "screenshot":
                    written = Path(folder) / "page.html"
                    written.write_text(written.read_text("utf-8").replace(f"{folder}/", ""), "utf-8")
                    draw_page(written, page.parent / f"{name}.png")
        except subprocess.CalledProcessError as error:
            failed.append(f"{command} (status {error.returncode})")
            continue
        if kind == "screenshot":
            body = f"![{name.replace('_', ' ')}]({name}.png)"
        elif kind == "plot":
            PLOTS[name]([json.loads(line) for line in output.splitlines()], page.parent / f"{name}.svg")
            body = f"![{name.replace('_', ' ')}]({name}.svg)"
        else:
            body = f"```{'console' if output.startswith('$') else 'text'}\n{output}\n```"
        replace_block(page, opening, f"{body}\n\n{about}\n{end}")
    return failed


def find_browser() -> str | None:
    """Return the path of Chromium; None if it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def draw_page(page: Path, picture: Path, *options: str) -> None:
    """Draw a page with Chromium, by default in light colors. Raises subprocess.CalledProcessError if it fails."""
    browser = find_browser()
    assert browser is not None
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={SIZE}"]
    command += [f"--user-data-dir={page.parent / 'browser'}", f"--screenshot={picture}", *options, page.as_uri()]
    subprocess.run(command, capture_output=True, timeout=120, check=True)


def replace_block(page: Path, opening: str, rest: str) -> None:
    """Write a block after its opening marker. Read the page again, because it may have changed during the command."""
    text = page.read_text(encoding="utf-8")
    filled = BLOCK.sub(lambda block: opening + rest if block[1] == opening else block[0], text)
    page.write_text(filled, encoding="utf-8")


def main() -> None:
    """Fill the blocks of all pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only the commands that contain this text")
    options = parser.parse_args()
    # A shell ignores Ctrl-C in background commands, but benchmarks end clusters by this signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    with tempfile.TemporaryDirectory() as days:
        write_days(Path(days), os.environ.get("CRITEO"))
        failed = [command for page in pages for command in fill(page, options.only, days)]
    if failed:
        sys.exit("These blocks are unchanged because their commands failed:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
