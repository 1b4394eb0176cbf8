"""Every operation on every path, when a rank dies, is stopped, makes no call, raises, or calls another operation.

Each other rank raises one error that names this rank, within the timeout. Then its group rejects further calls.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from .failing_ranks import OPERATIONS, TIMEOUT_S

_PROGRAM = Path(__file__).with_name("failing_ranks.py")
_LATE_S = 12.0
"""The permitted delay of the error on a busy machine."""
_AT_ONCE = 15
_PATHS: dict[str, dict[str, Any]] = {
    "shared memory": {"size": 3, "hosts": None, "algorithm": None},
    "network": {"size": 3, "hosts": [0, 1, 2], "algorithm": None},
    "ring on one host": {"size": 3, "hosts": None, "algorithm": "ring"},
    "hierarchical": {"size": 4, "hosts": [0, 0, 1, 1], "algorithm": "hierarchical"},
}
_FAILURES = ("dies", "is stopped", "stays away", "raises", "calls another")
_OFTEN = {"shared memory": ("dies",), "network": ("is stopped",)}
_WHOLE = ("shared memory", "dies")
_ALSO_OF_THE_FIRST = ("all_reduce", "gather", "send and recv", "recv in a chain", "split", "subgroup")
"""Rank 0 serves the store and is the leader of its host."""
_OFTEN_WHATEVER_FAILS = ("all_reduce, large", "recv from any", "recv in a chain", "split")
"""Operations that wait in different ways. The other operations are `thorough`, except for a rank that dies while the
ranks share memory."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[subprocess.Popen[str]]:
    """Start a process that imports and compiles once, and then forks the ranks."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", str(_PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        assert process.stdin is not None
        process.stdin.close()


def _run(process: subprocess.Popen[str], cases: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    assert process.stdin is not None
    assert process.stdout is not None
    for start in range(0, len(cases), _AT_ONCE):
        process.stdin.write(json.dumps(cases[start : start + _AT_ONCE]) + "\n")
        process.stdin.flush()
        yield from json.loads(process.stdout.readline())


def _complaints(case: dict[str, Any], answers: list[dict[str, Any]]) -> Iterator[str]:
    """Describe the wrong results of ranks in words."""
    victim, operation, failure = case["victim"], case["operation"], case["failure"]
    label = f"{operation}, rank {victim} {failure}"
    seen = {answer["rank"]: answer for answer in answers}
    for rank in {*range(case["size"])} - {victim}:
        answer = seen.get(rank)
        if answer is None or not answer["kind"]:
            yield (f"{label}: rank {rank} hung" if answer is None else f"{label}: rank {rank}: {answer['text']}")
            continue
        raised = f"{answer['kind']} {answer['ranks']} after {answer['after_s']:.1f} s: {answer['text']}"
        where = f"{label}: rank {rank} raised {raised}"
        if failure == "calls another":
            is_right = answer["kind"] in ("MismatchError", "RankLostError") and "rank" in answer["text"]
        else:
            is_right = (
                answer["kind"] == "RankLostError" and answer["ranks"] == [victim] and f"rank {victim}" in answer["text"]
            )
        if not is_right:
            yield where
        if answer["after_s"] > TIMEOUT_S + _LATE_S:
            yield f"too late: {where}"
        may_try_again = operation == "subgroup" and failure not in ("dies", "raises")
        if not may_try_again and not all("refuses further work" in refusal for refusal in answer["refuses"]):
            yield f"{where}; then {answer['refuses']}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("path", "failure"),
    [
        pytest.param(path, failure, marks=[pytest.mark.thorough] * (failure not in _OFTEN.get(path, ())))
        for path in _PATHS
        for failure in _FAILURES
    ],
)
def test_every_rank_names_the_failed_rank(ranks: subprocess.Popen[str], path: str, failure: str) -> None:
    is_often = failure in _OFTEN.get(path, ()) and (path, failure) != _WHOLE
    _check(ranks, path, failure, _OFTEN_WHATEVER_FAILS if is_often else tuple(OPERATIONS))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("path", "failure"),
    [(path, failure) for path, often in _OFTEN.items() for failure in often if (path, failure) != _WHOLE],
)
def test_other_operations(ranks: subprocess.Popen[str], path: str, failure: str) -> None:
    _check(ranks, path, failure, tuple(name for name in OPERATIONS if name not in _OFTEN_WHATEVER_FAILS))


def _check(ranks: subprocess.Popen[str], path: str, failure: str, operations: Sequence[str]) -> None:
    cases = [
        {**_PATHS[path], "operation": operation, "failure": failure, "victim": victim}
        for operation in operations
        for victim in (_PATHS[path]["size"] - 1, *((0,) if operation in _ALSO_OF_THE_FIRST else ()))
    ]
    complaints: list[str] = []
    for _ in range(2):  # a pause of the machine, which may exceed the timeout, spoils the cases that run then
        runs = zip(cases, _run(ranks, cases), strict=True)
        wrong = [(case, texts) for case, answers in runs if (texts := list(_complaints(case, answers)))]
        cases, complaints = [case for case, _ in wrong], [text for _, texts in wrong for text in texts]
        if not complaints:
            break
    assert not complaints, "\n".join(complaints)
