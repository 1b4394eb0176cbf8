"""Slurm's lists of nodes and of numbers per node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.meeting.node_list import MAX_NODES, parse_node_list, parse_repeated


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1 n2"),
        ("n[1-3]", "n1 n2 n3"),
        ("gpu[08-10,2],login", "gpu08 gpu09 gpu10 gpu2 login"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[099-101]", "n099 n100 n101"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("r[1-2]-ib.cluster", "r1-ib.cluster r2-ib.cluster"),
        ("a[1],b[2-2]c,10.0.0.[7-8]", "a1 b2c 10.0.0.7 10.0.0.8"),
    ],
)
def test_node_lists(text: str, names: str) -> None:
    assert parse_node_list(text) == tuple(names.split())


@pytest.mark.parametrize(
    "text",
    ["", ",", "n1,", "n[", "n]", "n[1", "n[]", "n[1-]", "n[-1]", "n[3-1]", "n[a-b]", "n[1,]", "n[[1]]", "n 1", "n\n",
     "n[1-3]]", "n[0-99999999999]", "n[1-99999,1-99999]", "a[1-9999]b[1-9999]", "n[\u0661-\u0662]"],
)  # fmt: skip
def test_unreadable_node_lists(text: str) -> None:
    with pytest.raises(UsageError, match="SLURM_STEP_NODELIST"):
        parse_node_list(text, "SLURM_STEP_NODELIST")


@given(st.text(alphabet="n1290[],-(x) \n\u0661", max_size=40))
def test_any_text_is_a_list_or_an_error_of_one_line(text: str) -> None:
    for parse in (parse_node_list, parse_repeated):
        message = ""
        try:
            assert 0 < len(parse(text, "the list")) <= MAX_NODES
        except UsageError as error:
            message = str(error)
        assert "\n" not in message


@pytest.mark.parametrize(("text", "numbers"), [("2", (2,)), ("2(x3),1", (2, 2, 2, 1)), ("1,4(x2)", (1, 4, 4))])
def test_repeated_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_repeated(text, "SLURM_STEP_TASKS_PER_NODE") == numbers


@pytest.mark.parametrize("text", ["", "x", "2(x0)", "2(3)", "2(x3", "2,,1", "2(x99999999999)", "-1"])
def test_unreadable_numbers(text: str) -> None:
    with pytest.raises(UsageError, match="SLURM_STEP_TASKS_PER_NODE"):
        parse_repeated(text, "SLURM_STEP_TASKS_PER_NODE")
