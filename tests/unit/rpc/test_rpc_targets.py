"""Valid and invalid functions of a call."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.rpc.targets import Call, call_of, creation_of, description_of, target_of
from paceline.rpc.wire.codec import Encoding

THIS_MODULE = __name__


@dataclass
class Scale:
    by: float

    def of(self, x: float) -> float:
        return self.by * x

    def __call__(self, x: float) -> float:
        return self.of(x)

    @staticmethod
    def plain(x: float) -> float:
        return x

    @classmethod
    def made(cls) -> Scale:
        return cls(1)


class Plain:
    def method(self) -> None:
        pass


def add(x: int, y: int, z: int = 0) -> int:
    return x + y + z


def test_functions_are_sent_by_name_and_methods_with_the_object() -> None:
    scale = Scale(2)
    assert target_of(add) == f"{THIS_MODULE}:add"
    assert target_of("m:f") == "m:f"
    assert target_of(Scale.of) == f"{THIS_MODULE}:Scale.of"
    assert target_of(scale.plain) == f"{THIS_MODULE}:Scale.plain"
    assert target_of(Scale.made) == target_of(scale.made) == f"{THIS_MODULE}:Scale.made"
    assert target_of(scale.of) == (scale, "of")
    assert target_of(scale) == (scale, "__call__")
    assert description_of((scale, "of")) == "Scale.of"
    assert creation_of((scale, "of")) is None
    assert target_of(functools.lru_cache(add)) == f"{THIS_MODULE}:add"
    with pytest.raises(UsageError, match="cannot find"):
        target_of(lambda: 0)


def test_arguments_of_a_partial_precede_arguments_of_the_call() -> None:
    half = functools.partial(functools.partial(add, 1, z=5), z=6)
    assert call_of(half, (2,), None) == Call(f"{THIS_MODULE}:add", (1, 2), {"z": 6})
    assert call_of(half, [2], {"z": 7}) == Call(f"{THIS_MODULE}:add", (1, 2), {"z": 7})
    assert call_of(functools.partial(Scale(2).of, 3), None, None) == Call((Scale(2), "of"), (3,), {})
    assert call_of(add, None, None) == Call(f"{THIS_MODULE}:add", (), None)
    bad: Any
    for bad in ("ab", 5):
        with pytest.raises(UsageError, match="args is"):
            call_of(half, bad, None)
    with pytest.raises(UsageError, match="kwargs is"):
        call_of(half, (), bad)


def test_methods_of_unsendable_objects_suggest_a_remedy() -> None:
    with pytest.raises(UsageError, match=r"method\(\) is a method of an object .*Plain\); create the object"):
        Encoding().encode_call((), target_of(Plain().method), (), {})
