"""Checks of the optimizers, of parameters and of batch normalization of ``paceline.horovod``, with two ranks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from horovod_calls import raises  # type: ignore[import-not-found]
from torch import nn

import paceline.horovod as hvd


def start(rank: int, size: int) -> None:
    hvd.init()


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn((5, 4), generator=torch.Generator().manual_seed(10 * step + rank))


def reference(num_steps: int, passes: int = 1, clip: float | None = None, lr: float = 0.1) -> list[torch.Tensor]:
    """Return the parameters after training on one rank with the batches of both ranks."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for step in range(num_steps):
        optimizer.zero_grad()
        for number in range(passes):
            for rank in range(2):
                (model(batch(rank, step * passes + number)).square().mean() / 2).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(num_steps: int, passes: int = 1, clip: float | None = None, **options: Any) -> list[torch.Tensor]:
    model = make_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        plain, named_parameters=model.named_parameters(), backward_passes_per_step=passes, **options
    )
    for step in range(num_steps):
        optimizer.zero_grad()
        for number in range(passes):
            model(batch(hvd.rank(), step * passes + number)).square().mean().backward()
        if clip is None:
            optimizer.step()
        else:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor], **tolerance: Any) -> None:
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value, other, **tolerance)


def check_training(rank: int, size: int) -> None:
    expected = reference(4)
    assert_equal(train(4), expected)
    assert_equal(train(4, gradient_predivide_factor=4.0), expected)
    for groups in (1, 2, 7):
        assert_equal(train(4, groups=groups), expected)
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        assert_equal(train(4, compression=compression), expected, rtol=0.05, atol=0.01)
    assert_equal(train(3, passes=2), reference(3, passes=2))
    assert_equal(train(3, clip=0.1), reference(3, clip=0.1))


def check_kind_and_state(rank: int, size: int) -> None:
    model = make_model()
    plain = torch.optim.Adam(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(plain)
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    model(batch(rank, 0)).sum().backward()
    optimizer.step()
    scheduler.optimizer.zero_grad()
    assert len(optimizer.state_dict()["state"]) == 4
    averaged = hvd.allgather(next(model.parameters()).detach()[None])
    assert torch.equal(averaged[0], averaged[1])
    optimizer.load_state_dict(optimizer.state_dict())
    later = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    model(batch(rank, 0)).sum().backward()
    optimizer.step()
    later.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def check_misuse(rank: int, size: int) -> None:
    model: Any = make_model()
    names = list(model.named_parameters())

    def make(**options: Any) -> Any:
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)

    with raises(ValueError, "got Sequential, expected an optimizer"):
        hvd.DistributedOptimizer(model)
    with raises(ValueError, "got Sequential, expected an optimizer"):
        hvd.broadcast_optimizer_state(model, root_rank=0)
    with raises(ValueError, "op='sum'"):
        make(op="sum")
    with raises(ValueError, "compression='fp16'"):
        make(compression="fp16")
    with raises(ValueError, "sequence of tuples"):
        make(named_parameters=list(model.parameters()))
    with raises(ValueError, "must be unique", "0.weight"):
        make(named_parameters=[*names, ("0.weight", names[1][1])])
    with raises(ValueError, "were not named", "[3, 4]"):
        make(named_parameters=names[1:])
    with raises(ValueError, "backward_passes_per_step=0"):
        make(backward_passes_per_step=0)
    with raises(ValueError, "gradient_predivide_factor=0.0"):
        make(gradient_predivide_factor=0.0)
    with raises(ValueError, "gradient_predivide_factor not supported"):
        make(gradient_predivide_factor=2.0, op=hvd.Sum)
    with raises(ValueError, "non-negative integer"):
        make(groups=-1)
    with raises(ValueError, "more than one group"):
        make(groups=[[names[0][1]], [names[0][1]]])
    optimizer = make(named_parameters=names, groups=[[names[0][1], names[3][1]]])
    for _ in range(2):
        model(batch(rank, 0)).sum().backward()
        with raises(AssertionError, "optimizer.zero_grad() was called after loss.backward()"):
            optimizer.zero_grad()
        with raises(AssertionError, "backward_passes_per_step"):
            model(batch(rank, 0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert ["skip_synchronize" in str(warning.message) for warning in caught] == [True]
    optimizer.set_backward_passes_per_step(2)
    assert optimizer.backward_passes_per_step == 2


def check_parameters_without_gradient(rank: int, size: int) -> None:
    """A parameter with a gradient on one rank only is averaged with zeros, and a frozen one takes no part."""
    layers = [nn.Linear(1, 1, bias=False) for _ in range(3)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.fill_(1.0)
    layers[2].weight.requires_grad_(False)
    module = nn.ModuleList(layers)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(module.parameters(), lr=1.0), named_parameters=module.named_parameters()
    )
    layers[rank](torch.ones(1, 1)).sum().backward()
    optimizer.step()
    assert [layer.weight.item() for layer in layers] == [0.5, 0.5, 1.0]


def check_sparse_gradients(rank: int, size: int) -> None:
    for sparse_as_dense in (False, True):
        embedding = nn.Embedding(4, 2, sparse=True)
        nn.init.zeros_(embedding.weight)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(embedding.parameters(), lr=1.0),
            named_parameters=embedding.named_parameters(),
            sparse_as_dense=sparse_as_dense,
        )
        for _ in range(2):
            embedding(torch.tensor([rank, 3])).sum().backward()
            optimizer.step()
            gradient = embedding.weight.grad
            assert gradient is not None
            assert gradient.is_sparse, "SparseAdam needs a sparse gradient"
            optimizer.zero_grad()
        assert embedding.weight[:, 0].tolist() == [-1.0, -1.0, 0.0, -2.0]


def check_process_set(rank: int, size: int) -> None:
    alone = [hvd.add_process_set([number]) for number in range(size)]
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), process_set=alone[0])
    model(batch(rank, 0)).sum().backward()
    optimizer.step()
    weights = hvd.allgather(next(model.parameters()).detach()[None])
    assert not torch.equal(weights[0], weights[1])
    for process_set in alone:
        hvd.remove_process_set(process_set)


def check_adasum(rank: int, size: int) -> None:
    equal = hvd.allreduce(torch.tensor([3.0, 4.0]), op=hvd.Adasum)
    torch.testing.assert_close(equal, torch.tensor([3.0, 4.0]))  # parallel vectors are averaged
    orthogonal = hvd.allreduce(torch.tensor([1.0, 0.0] if rank else [0.0, 2.0]), op=hvd.Adasum)
    torch.testing.assert_close(orthogonal, torch.tensor([1.0, 2.0]))
    assert hvd.allreduce(torch.tensor([1.0 * rank, 0.0]), op=hvd.Adasum).tolist() == [1.0, 0.0]
    weight = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Adasum)
    weight[rank].backward()
    optimizer.step()
    assert weight.tolist() == [-1.0, -1.0]
    with raises(AssertionError, "Adasum"):
        optimizer.skip_synchronize()


def check_broadcasts(rank: int, size: int) -> None:
    model = make_model()
    with torch.no_grad():
        next(model.parameters()).add_(rank)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1), betas=(0.5 + 0.1 * rank, 0.9))
    if rank == 1:
        model(batch(rank, 0)).sum().backward()
        optimizer.step()
    optimizer = hvd.DistributedOptimizer(optimizer)
    for params in (model.state_dict(), model.named_parameters()):
        hvd.broadcast_parameters(params, root_rank=1)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1, model=model)
    values = [
        next(model.parameters()).detach(), optimizer.state[next(model.parameters())]["exp_avg"],
        torch.tensor([optimizer.param_groups[0]["lr"], *optimizer.param_groups[0]["betas"]]),
    ]  # fmt: skip
    for value in values:
        both = hvd.allgather(value[None])
        assert torch.equal(both[0], both[1])
    assert optimizer.param_groups[0]["betas"] == (0.6, 0.9)
    with raises(ValueError, "invalid params"):
        hvd.broadcast_parameters(3, root_rank=0)  # type: ignore[arg-type]


def check_sync_batch_norm(rank: int, size: int) -> None:
    torch.manual_seed(3)
    whole = torch.randn(6, 2, 3)
    expected, layer = nn.BatchNorm1d(2), hvd.SyncBatchNorm(2)
    inputs = [whole.clone().requires_grad_(), whole[4 * rank : 4 + 2 * rank].clone().requires_grad_()]
    outputs = [expected(inputs[0]), layer(inputs[1])]
    torch.testing.assert_close(outputs[1], outputs[0][4 * rank : 4 + 2 * rank])
    for output, part in zip(outputs, (slice(None), slice(4 * rank, 4 + 2 * rank)), strict=True):
        output.backward(whole.square()[part])
    assert inputs[0].grad is not None
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad[4 * rank : 4 + 2 * rank])
    torch.testing.assert_close(layer.running_var, expected.running_var)


def check_join_with_uneven_batches(rank: int, size: int) -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    for step in range(2 + 2 * rank):
        optimizer.zero_grad()
        model(batch(rank, step)).sum().backward()
        optimizer.step()
    assert hvd.join() == 1
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
