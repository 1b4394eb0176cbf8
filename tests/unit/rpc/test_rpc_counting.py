"""Reference counts: an object lives exactly as long as a worker holds a reference."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.random_examples import num_examples

from paceline.errors import ProtocolError
from paceline.rpc.counting import OwnedObjects, ReferenceId

A = ReferenceId(0, 1, 1)


def test_the_last_release_frees_the_object() -> None:
    owned = OwnedObjects()
    owned.create(A, 1)
    assert owned.share(A, 2)
    assert owned.share(A, 2)
    assert not owned.release(A, 1, 1)
    assert not owned.release(A, 2, 1)
    assert A in owned
    assert owned.holders(A) == {2: 1}
    assert owned.release(A, 2, 1)
    assert A not in owned
    assert not owned.share(A, 3)
    assert len(owned) == 0


def test_removing_a_holder_releases_all_its_references() -> None:
    owned = OwnedObjects()
    b = A._replace(number=2)
    owned.create(A, 1)
    owned.create(b, 1)
    owned.share(b, 2)
    assert owned.remove_holder(1) == [A]
    assert owned.remove_holder(1) == []
    assert owned.remove_holder(2) == [b]


@pytest.mark.parametrize(("holder", "times"), [(2, 1), (1, 2), (1, 0), (1, -1)])
def test_releasing_more_references_than_held_is_an_error(holder: int, times: int) -> None:
    owned = OwnedObjects()
    owned.create(A, 1)
    with pytest.raises(ProtocolError):
        owned.release(A, holder, times)
    with pytest.raises(ProtocolError, match="twice"):
        owned.create(A, 2)
    assert owned.holders(A) == {1: 1}


steps = st.lists(
    st.tuples(
        st.sampled_from(["create", "share", "release", "lose"]), st.integers(0, 3), st.integers(0, 2), st.integers(1, 2)
    ),
    max_size=60,
)


@num_examples(200)
@given(steps)
def test_the_table_equals_a_simple_count_of_holders(taken: list[tuple[str, int, int, int]]) -> None:
    owned = OwnedObjects()
    bags: dict[ReferenceId, Counter[int]] = {}
    for step, number, holder, times in taken:
        reference = ReferenceId(0, 0, number)
        bag = bags.get(reference)
        if step == "create" and bag is None:
            owned.create(reference, holder)
            bags[reference] = Counter([holder])
        elif step == "share":
            assert owned.share(reference, holder) == (bag is not None)
            if bag is not None:
                bag[holder] += 1
        elif step == "release" and bag is not None and bag[holder] >= times:
            bag[holder] -= times
            assert owned.release(reference, holder, times) == (bag.total() == 0)
        elif step == "lose":
            freed = set()
            for key, held in bags.items():
                if held.pop(holder, 0) and not held.total():
                    freed.add(key)
            assert set(owned.remove_holder(holder)) == freed
        bags = {key: held for key, held in bags.items() if held.total()}
        assert {key: dict(+held) for key, held in bags.items()} == {key: owned.holders(key) for key in bags}
        assert len(owned) == len(bags)
