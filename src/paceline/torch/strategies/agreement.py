"""Describe models, optimizers and registered states, for checks that all ranks have the same ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.torch.embeddings import find_embeddings


def signature_of(model: nn.Module) -> list[list[Any]]:
    """Describe the parameters, buffers and embeddings of a model."""

    def kind(tensor: torch.Tensor) -> str:
        frozen = "frozen " if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
        return frozen + str(tensor.dtype).removeprefix("torch.")

    tensors = [*model.named_parameters(), *model.named_buffers()]
    described = [[name, list(tensor.shape), kind(tensor)] for name, tensor in tensors]
    rows = [
        [name, [embedding.dim], f"rows of {embedding.initializer}, seed={embedding.seed}, update={embedding.update}"]
        for name, embedding in find_embeddings(model).items()
    ]
    return described + rows


def describe_other_model(rank: int, own: list[list[Any]], first: list[list[Any]]) -> str:
    def show(found: list[list[Any]], position: int) -> str:
        if position >= len(found):
            return "nothing"
        name, shape, kind = found[position]
        return f"{name!r} ({kind} {shape})"

    position = _first_difference(own, first)
    return (
        f"rank {rank} has another model than rank 0: {show(own, position)} instead of "
        f"{show(first, position)}; build the same model on every rank"
    )


def describe_optimizers(optimizers: list[Optimizer]) -> list[list[str]]:
    """Describe each parameter group: the class, the number of parameters, and the options that are simple values."""
    described = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            options = {
                name: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
                for name, value in group.items()
            }
            shown = [
                f"{name}={value}"
                for name, value in options.items()
                if value is None or isinstance(value, bool | int | float | str)
            ]
            described.append([type(optimizer).__name__, f"{len(group['params'])} parameters", *shown])
    return described


def describe_other_optimizer(rank: int, own: list[list[str]], first: list[list[str]]) -> str:
    position = _first_difference(own, first)
    group, other = ((*groups, *[["no group"]] * (position + 1))[position] for groups in (own, first))
    differing = [", ".join(part for part in a if part not in b) for a, b in ((group, other), (other, group))]
    return (
        f"rank {rank} has another optimizer than rank 0: {differing[0]} instead of {differing[1]} in parameter group "
        f"{position}; create the same optimizer on every rank"
    )


def describe_other_names(rank: int, own: list[str], first: list[str]) -> str:
    """Describe the difference between two ranks' registered states."""
    missing, extra = ([name for name in a if name not in b] for a, b in ((first, own), (own, first)))
    name = (missing or extra)[0]
    has, other_has = ("has not", "has") if missing else ("has", "has not")
    return (
        f"rank {rank} {has} registered the state {name!r}, but rank 0 {other_has}: call register_state({name!r}, ...) "
        "on every rank, before the loop"
    )


def _first_difference(own: list[Any], first: list[Any]) -> int:
    pairs = zip(own, first, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(own), len(first)))
