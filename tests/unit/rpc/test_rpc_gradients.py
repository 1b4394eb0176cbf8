"""The data that a process records for an autograd context, and the leaves of its backward pass."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.errors import ProtocolError, UsageError


def test_rpc_needs_no_torch() -> None:
    code = "import sys, paceline.rpc; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_leaves_are_found_once() -> None:
    torch = pytest.importorskip("torch")
    from paceline.rpc.autograd import leaves_of

    x, w, fixed = (torch.ones(2, requires_grad=flag) for flag in (True, True, False))
    y = (x * w + x * fixed).relu()
    found = leaves_of([y.sum(), y, w])
    assert {id(tensor) for tensor in found} == {id(x), id(w)}
    assert len(found) == 2
    assert leaves_of([fixed * 2]) == []


def test_remote_gradients_are_separated_by_message() -> None:
    torch = pytest.importorskip("torch")
    from paceline.rpc.autograd import GradientContext

    part = GradientContext(5)
    own, one, two, three = (torch.ones(1, requires_grad=True) for _ in range(4))
    part.record_received(7, 1, [one, two])
    part.record_received(8, 1, [three])
    gathered = part.gather([own, two, three, one], [torch.ones(1), torch.full((1,), 2.0), torch.full((1,), 3.0), None])
    assert {
        where: [tensor if tensor is None else tensor.item() for tensor in found] for where, found in gathered.items()
    } == {
        (7, 1): [None, 2.0],
        (8, 1): [3.0],
    }
    assert part.gather([own], [torch.full((1,), 0.5)]) == {}
    assert part.gradients[own].item() == 1.5
    assert part.record_sent(3, []) == 0
    assert part.sent(part.record_sent(3, [own])) == [own]
    assert part.workers == {3}
    with pytest.raises(ProtocolError, match=r"message .* not sent"):
        part.sent(99)


def test_contexts_end_with_the_owner() -> None:
    pytest.importorskip("torch")
    from paceline.rpc.autograd import GradientContexts

    contexts = GradientContexts()
    first, second = contexts.new(1), contexts.new(2)
    assert contexts.existing(first).number == first
    contexts.remove_worker(1)
    with pytest.raises(UsageError, match=f"autograd context {first} does not exist"):
        contexts.existing(first)
    assert contexts.gradients(first) == {}
    assert contexts.pop(second) is not None
    assert contexts.pop(second) is None
