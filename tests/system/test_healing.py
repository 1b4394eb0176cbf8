"""A new rank receives a large state in parts while the other ranks train. Ranks are killed during the transfer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.warm.processes import RANKS

from .elastic_training import TRAIN, ends
from .running import Commands, Finished

_IN_PARTS = """
import os, signal
from paceline.collectives.elastic import ElasticGroup
from paceline.protocol import healing
from paceline.torch.strategies.elastic import chunks, state

healing.SMALL_BYTES, healing.CHUNK_BYTES, healing.MOST_BYTES, healing.COMPARED_BYTES = 0, 400, 1500, 3000
chunks._LEAST_BYTES = 0  # the state of the average and of the generator is divided too

def watch(name, victim):
    original, lengths = getattr(ElasticGroup, name), []

    def call(group, message, *given):
        original(group, message, *given)
        lengths.append(len(message))
        print(name, group.member, len(message), group.ready, flush=True)
        if str(group.member) == victim and len(lengths) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(ElasticGroup, name, call)

watch("send_part", os.environ.get("SENDER"))
watch("receive_part", os.environ.get("RECEIVER"))

compared = 0

def checksums(chunks, numbers):
    global compared
    compared = numbers.stop
    return original_checksums(chunks, numbers)

def split(numbers, sizes):
    if str(incarnation) in (os.environ.get("SENDER"), os.environ.get("RECEIVER")):
        os.kill(os.getpid(), signal.SIGKILL)  # the epoch has ended before the third part
    print("differs", sum(number < compared for number in numbers), compared, len(sizes), flush=True)
    return healing.split_into_parts(numbers, sizes)

original_checksums, chunks.StateChunks.checksums = chunks.StateChunks.checksums, checksums
state.split_into_parts = split
"""

_GENERATOR_CHUNKS = 13
"""The generator is registered last, and its state has 5056 bytes."""


@pytest.fixture
def elastic(paceline: Commands, tmp_path: Path) -> Commands:
    """Run commands whose ranks are forked from a process that has imported torch."""
    paceline.environment[RANKS] = "torch"
    (tmp_path / "train.py").write_text(_IN_PARTS + TRAIN)
    return paceline


def run(elastic: Commands, victims: str, last: int, *options: str) -> Finished:
    ranks = ["--strategy", "all-reduce", "--min-ranks", "1", "--nproc-per-node", "3"]
    finished = elastic.run("run", *ranks, *options, "train.py", victims, str(last))
    assert finished.status == 0, finished
    return finished


def parts(finished: Finished, name: str) -> list[tuple[int, int]]:
    """Return the member and the number of bytes of each part."""
    return [(int(member), int(size)) for member, size in re.findall(rf"{name} (\d+) (\d+) ", finished.out)]


@pytest.mark.parametrize("options", [[], pytest.param(["--global-batch", "24"], marks=pytest.mark.thorough)])
def test_a_rank_that_received_the_state_in_parts_is_equal(elastic: Commands, options: list[str]) -> None:
    finished = run(elastic, "1", 3, *options)
    last = ends(finished)
    assert last.keys() == {0, 2, 3}
    assert len(set(last.values())) == 1, "the ranks differ"
    received = parts(finished, "receive_part")
    assert {member for member, _ in received} == {3}
    assert max(size for _, size in received) <= 1500
    found = [[int(number) for number in each] for each in re.findall(r"differs (\d+) (\d+) (\d+)", finished.out)]
    differs, compared, total = max(found, key=lambda each: each[1])
    # Only chunks of the generator differ, because its state is loaded at the end.
    assert 0 < compared <= total, finished.out  # the end of an epoch ends the transfer
    assert differs <= max(compared - (total - _GENERATOR_CHUNKS), 0), finished.out


def test_the_rank_that_sends_the_state_is_killed(elastic: Commands) -> None:
    elastic.environment["SENDER"] = "0"
    finished = run(elastic, "1", 4)
    last = ends(finished)
    assert last.keys() == {2, 3, 4}
    assert len(set(last.values())) == 1, "the ranks differ"


@pytest.mark.thorough
def test_the_rank_that_receives_the_state_is_killed(elastic: Commands) -> None:
    elastic.environment["RECEIVER"] = "3"
    finished = run(elastic, "1", 4)
    last = ends(finished)
    assert last.keys() == {0, 2, 4}
    assert len(set(last.values())) == 1, "the ranks differ"
