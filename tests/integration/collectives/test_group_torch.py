"""Groups use the memory of PyTorch's tensors without a copy, also of bfloat16 tensors."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.collectives import Group
from paceline.errors import UsageError
from paceline.testing import run_ranks

torch = pytest.importorskip("torch")
_DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")


@pytest.mark.parametrize("options", [{}, {"algorithm": "ring"}, {"hosts": [0, 0, 1]}], ids=["shared", "ring", "hosts"])
def test_tensors_of_every_dtype(options: dict[str, Any]) -> None:
    def call(group: Group) -> None:
        for name in _DTYPES:
            dtype = getattr(torch, name)
            for shape in ((), (7,), (3, 1000), (70_000,)):
                given = torch.ones(shape, dtype=dtype)
                total = group.all_reduce(given)
                assert isinstance(total, torch.Tensor)
                assert (total.dtype, tuple(total.shape)) == (dtype, shape)
                assert (total == (1 if name == "bool" else group.size)).all()
                assert group.all_reduce(given, "max", out=given) is given
            whole = group.all_gather(torch.full((2, 3), group.rank % 2, dtype=dtype))
            assert whole[:, 0].tolist() == [rank % 2 for rank in range(group.size) for _ in range(2)]
            transposed = torch.full((5, 4), group.rank == 1, dtype=dtype).T
            assert group.broadcast(transposed, root=1) is transposed
            assert (transposed == 1).all()
        mean = group.all_reduce(torch.full((9,), group.rank, dtype=torch.bfloat16), "mean")
        assert (mean == (group.size - 1) / 2).all()
        got = torch.zeros(5, dtype=torch.bfloat16)
        ticket = group.send_async(torch.full((5,), 1.5, dtype=torch.bfloat16), (group.rank + 1) % group.size)
        group.recv(got)
        ticket.wait()
        assert (got == 1.5).all()

    run_ranks(3, call, **options)


def test_gradients_are_unchanged() -> None:
    def call(group: Group) -> None:
        leaf = torch.ones((4, 3), requires_grad=True)
        assert not group.all_reduce(leaf).requires_grad
        group.broadcast(leaf)
        turned = torch.ones((4, 3)).T.requires_grad_()
        group.all_reduce(turned, out=turned)
        assert (turned == 2).all()
        assert turned.requires_grad

    run_ranks(2, call)


@pytest.mark.parametrize("tensor", [torch.zeros(2, dtype=torch.complex64), torch.zeros(2, device="meta")])
def test_unsendable_values_are_rejected(tensor: Any) -> None:
    def call(group: Group) -> None:
        with pytest.raises(UsageError, match=r"complex64|meta"):
            group.all_reduce(tensor)

    run_ranks(1, call)
