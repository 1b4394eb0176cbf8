"""Code blocks of the README and the docs run as printed.

Blocks of ``python`` and ``sh`` must succeed. The output of a ``console`` block must match, with any digits in place of
its digits and any lines in place of ``...``. Each page runs in a directory of its own with the files of :mod:`.files`.
A comment ``<!-- docs test: … -->`` before a block sets another treatment: ``file NAME`` writes it, ``run on two
ranks``, ``together`` starts all lines at the same time, ``background`` leaves them running, ``not run, REASON``.

``make figures`` runs the blocks of figures, with other data. Only those of the README run here too.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks import figures
from sybil import Document, Example, Sybil
from sybil.parsers.markdown import CodeBlockParser
from tests.docs.files import PRELUDES, write_files, write_models
from tests.free_ports import free_port
from tests.pages import PAGES, ROOT
from tests.warm.processes import RANKS, RELAYED_COMMAND

LANGUAGES = ("python", "sh", "console", "json")
COMMENT = re.compile(r"<!-- docs test: ((?:(?!-->).)*) -->\n\Z", re.DOTALL)
STARTS_EMPTY = {"click_model", "pytorch_script"}
"""Pages that create their files themselves."""
QUICK = ("python", "console")
"""Languages of the blocks of the README that always run. Its other blocks and all other pages are `thorough`."""


def treatment(example: Example) -> str:
    """Return the text of the comment before a block, or an empty text."""
    found = COMMENT.search(example.document.text, 0, example.region.start)
    return " ".join(found[1].split()) if found else ""


class Page:
    """Runs the blocks of one page in a directory."""

    def __init__(self, path: Path, directory: Path, programs: Sequence[Path] = ()) -> None:
        """Commands are looked up in the folders `programs` first."""
        self.directory, self.programs = directory, programs
        self.name = name_of(path)
        self.prelude = PRELUDES.get(self.name, "")
        self.namespace: dict[str, Any] = {"__name__": "__main__"}
        self.processes: list[subprocess.Popen[str]] = []
        self.ports = {"7337": str(free_port()), "29500": str(free_port()), "7000": str(free_port())}

    def with_local_paths(self, text: str) -> str:
        """Return a command with addresses and directories of this machine."""
        text = text.replace("10.0.0.1", "127.0.0.1").replace("10.0.0.2", "127.0.0.1").replace("0.0.0.0", "127.0.0.1")
        text = (
            text.replace("--snapshot-every 5m", "--snapshot-every 1000")
            .replace("/data/spill", str(self.directory))
            .replace("examples/", f"{ROOT}/examples/")
        )
        text = re.sub(r"--(nproc-per-node|workers) [48]\b", r"--\1 2", text)  # two cores are enough for a test
        text = re.sub(r"paceline scheduler (?!.*--port)", "paceline scheduler --port 7337 ", text)
        for documented, port in self.ports.items():
            text = text.replace(f":{documented}", f":{port}").replace(f"--port {documented}", f"--port {port}")
        return text

    def run(self, command: str) -> str:
        """Run a shell command and return its standard output and standard error. Raises AssertionError if it fails."""
        output = self.directory / f"output{len(self.processes)}"
        with output.open("w") as stream:
            process = subprocess.Popen(
                ["bash", "-c", self.with_local_paths(command)],
                cwd=self.directory,
                env=self.variables(),
                stdout=stream,
                stderr=stream,
                text=True,
                start_new_session=True,
            )
        self.processes.append(process)
        status = process.wait(240)
        text = output.read_text()
        assert status == 0, f"{self.name}: `{command}` exited with {status}:\n{text}"
        return text

    def variables(self) -> dict[str, str]:
        """Return the variables of commands."""
        path = os.pathsep.join([*map(str, self.programs), str(Path(sys.executable).parent), os.environ["PATH"]])
        return {**os.environ, "PATH": path, RANKS: "torch"}

    def evaluate(self, example: Example) -> None:
        """Run one block, or write it."""
        blocks = figures.BLOCK.finditer(example.document.text)
        if self.name != "README.md" and any(block.start() < example.region.start < block.end() for block in blocks):
            return
        kind, source = treatment(example), str(example.parsed)
        language = example.region.lexemes["arguments"]
        if kind.startswith("file "):
            (self.directory / kind.removeprefix("file ")).write_text(self.with_local_paths(source))
        elif kind.startswith("not run, ") or language == "json":
            return
        elif kind == "run on two ranks":
            (self.directory / "block.py").write_text(source)
            self.run("paceline run --nproc-per-node 2 block.py")
        elif kind == "together":
            self.run(" &\n".join(source.strip().splitlines()) + " &\nwait")
        elif kind.startswith("background"):
            times = 2 if kind.endswith("twice") else 1
            self.run("".join(f"{line.partition(' #')[0]} &\n" * times for line in source.splitlines()))
            if "paceline scheduler" in source:
                self.wait_for_scheduler()
        elif language == "sh":
            self.run(f"set -e\n{source}")
        elif language == "console":
            for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", source, re.MULTILINE):
                compare(expected, self.run(command), command)
        else:
            if self.prelude:
                exec(compile(self.prelude, "prelude", "exec"), self.namespace)
                self.prelude = ""
            exec(compile(self.with_local_paths(source), f"{self.name}:{example.line}", "exec"), self.namespace)

    def wait_for_scheduler(self) -> None:
        """Wait until the scheduler that a command started in the background listens."""
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(self.ports["7337"])), 1):
                return
            time.sleep(0.1)

    def close(self) -> None:
        """End the background processes of commands, and close the resources of a prelude."""
        at_end = self.namespace.get("at_end")
        if isinstance(at_end, contextlib.ExitStack):
            at_end.close()
        for process in self.processes:
            for number in (signal.SIGINT, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    break


def compare(expected: str, printed: str, command: str) -> None:
    """Check that the output of a command equals the documented output, except for digits and their number."""
    parts = (re.sub(r"\d[\d,.]*(e-?\d+)?", "@", re.sub(r"\s+", " ", part.strip())) for part in expected.split("...\n"))
    pattern = ".*".join(re.escape(part) for part in parts)
    found = re.sub(r"\d[\d,.]*(e-?\d+)?", "@", re.sub(r"\s+", " ", printed.strip()))
    assert re.fullmatch(pattern, found, re.DOTALL), f"`{command}` printed\n{printed}\nThe page shows\n{expected}"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("files")
    write_files(directory)
    return directory


@pytest.fixture(scope="module")
def files_and_models(files: Path) -> Path:
    write_models(files)
    return files


def run_blocks(path: Path, directory: Path, languages: Sequence[str], programs: Sequence[Path] = ()) -> None:
    """Run the blocks of a page in some languages."""
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(Page(path, directory, programs)) as page:
        patch.chdir(directory)
        patch.syspath_prepend(directory)
        document: Document = Sybil([CodeBlockParser(name, page.evaluate) for name in languages]).parse(path)
        for example in document.examples():
            example.evaluate()


def has_blocks(path: Path) -> bool:
    """Return whether a page has blocks that can run."""
    return bool(re.search(rf"^```({'|'.join(LANGUAGES)})$", path.read_text(encoding="utf-8"), re.MULTILINE))


def name_of(path: Path) -> str:
    """Return the path of a page in the repository."""
    return path.relative_to(ROOT).as_posix()


@pytest.mark.usefixtures("warm_clusters")
def test_quick_blocks_of_the_readme_run(files: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The commands are forks of a process with loaded modules."""
    command = tmp_path_factory.mktemp("bin") / "paceline"
    command.write_text(f'#!/bin/sh\nexec {RELAYED_COMMAND} paceline "$@"\n')
    command.chmod(0o755)
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    run_blocks(ROOT / "README.md", tmp_path, QUICK, [command.parent])


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", [path for path in PAGES if has_blocks(path)], ids=name_of)
def test_blocks_run(path: Path, files_and_models: Path, tmp_path: Path) -> None:
    if path.stem not in STARTS_EMPTY:
        shutil.copytree(files_and_models, tmp_path, dirs_exist_ok=True)
    run_blocks(path, tmp_path, LANGUAGES)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_blocks_have_a_language(path: Path) -> None:
    fences = re.findall(r"^```(.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    opening = fences[::2]
    assert set(opening) <= {*LANGUAGES, "text", "mermaid", "{toctree}", "{eval-rst}"}
