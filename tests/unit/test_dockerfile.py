"""The Dockerfile's instructions match the project: its Python, its files, its extras and its command."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

tomllib = pytest.importorskip("tomllib")
ROOT = Path(__file__).parents[2]
STAGES = [
    re.findall(r"^([A-Z]+) (.+)$", stage, re.MULTILINE)
    for stage in re.split(r"^(?=FROM )", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
]
HEAD, BUILD, IMAGE = STAGES
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def values(stage: list[tuple[str, str]], instruction: str) -> list[str]:
    return [value for name, value in stage if name == instruction]


def argument(stage: list[tuple[str, str]], name: str) -> str:
    return dict(value.split("=") for value in values(stage, "ARG"))[name]


def test_both_stages_have_a_supported_python() -> None:
    assert [values(stage, "FROM")[0].split()[0] for stage in (BUILD, IMAGE)] == ["python:${PYTHON}-slim"] * 2
    version = argument(HEAD, "PYTHON")
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]


def test_the_copied_files_make_a_wheel_with_the_command(tmp_path: Path) -> None:
    for files in values(BUILD, "COPY"):
        *sources, target = files.split()
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, tmp_path / target)
    assert values(BUILD, "RUN") == ["pip wheel --no-deps --wheel-dir /wheels ."]
    assert PYPROJECT["build-system"]["build-backend"] == "hatchling.build"
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "wheels"], cwd=tmp_path, check=True
    )
    (wheel,) = (tmp_path / "wheels").glob("paceline-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "paceline/cli/__init__.py" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_the_image_installs_the_wheel_and_runs_the_command() -> None:
    (step,) = values(IMAGE, "RUN")
    assert "/wheels/paceline-*.whl" in step
    assert values(IMAGE, "COPY") == ["--from=build /wheels /wheels"]
    assert {*argument(IMAGE, "EXTRAS").split(",")} <= {*PROJECT["optional-dependencies"]}
    assert json.loads(*values(IMAGE, "ENTRYPOINT")) == [*PROJECT["scripts"]]
    (user,) = values(IMAGE, "USER")
    assert int(user) > 0
    assert f"--uid {user} " in step
