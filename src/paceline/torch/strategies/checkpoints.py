"""Checkpoints: one format for every strategy and every number of ranks.

A checkpoint is a saved model as :mod:`paceline.ps.saving` writes it: a manifest with checksums, the embeddings' tables
by key, and two files of tensors: the model's ``state_dict``, and the optimizer's state in torch's own layout with
parameters' names for numbers (``layer.weight/exp_avg``). Where the state lived, on servers or in ranks, is not in it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch
from torch import nn

from paceline.errors import ModelError, PacelineError, UsageError
from paceline.ps.saving import SavedModel, read_model, save_model

if TYPE_CHECKING:
    from paceline.torch.strategies.base import Strategy

KIND = "torch checkpoint"
_Result = TypeVar("_Result")


def save(strategy: Strategy, directory: str | os.PathLike[str], extra: dict[str, Any]) -> None:
    """See :meth:`Strategy.save`."""
    module, optimizer = _prepared(strategy, "save"), strategy.optimizer
    strategy._gather_values()
    state = strategy._gather_optimizer_state() if optimizer is not None else {}
    strategy.barrier()  # nobody changes the tables any more

    def write() -> None:
        tables = strategy.embedder.tables.values() if strategy.embedder is not None else ()
        tensors = {"model": _encode(_state_of(module))}
        description: dict[str, Any] = {"kind": KIND, "extra": extra}
        if optimizer is not None:
            names = _names(module, optimizer)
            groups = [
                {**_plain(group), "params": own} for group, own in zip(optimizer.param_groups, names, strict=True)
            ]
            flat, numbers = _flatten(state, [name for own in names for name in own])
            tensors["optimizer"] = _encode(flat)
            description["optimizer"] = {"class": type(optimizer).__name__, "groups": groups, "numbers": numbers}
        if strategy.scheduler is not None:
            description["scheduler"] = _plain(strategy.scheduler.state_dict())
        save_model(directory, ((table.spec, table.items()) for table in tables), description, tensors)

    _together(strategy, write if strategy.is_main else _nothing)


def load(strategy: Strategy, directory: str | os.PathLike[str]) -> dict[str, Any]:
    """See :meth:`Strategy.load`."""
    module, optimizer = _prepared(strategy, "load"), strategy.optimizer
    saved, values, state = _together(strategy, lambda: _read(strategy, module, directory))
    description = saved.manifest.model
    strategy._gather_values()  # nothing is under way
    strategy.barrier()
    with torch.no_grad():
        own = _state_of(module)
        for name, value in values.items():
            own[name].copy_(value)
    strategy._scatter_values()
    if optimizer is not None and "optimizer" in description:
        for group, kept in zip(optimizer.param_groups, description["optimizer"]["groups"], strict=True):
            group.update({key: _like(group.get(key), value) for key, value in kept.items() if key != "params"})
        strategy._scatter_optimizer_state(state)
    if strategy.scheduler is not None and "scheduler" in description:
        strategy.scheduler.load_state_dict(description["scheduler"])
    if strategy.embedder is not None:
        _together(strategy, lambda: _load_tables(strategy, saved))
    extra: dict[str, Any] = description.get("extra", {})
    return extra


def _prepared(strategy: Strategy, what: str) -> nn.Module:
    if strategy.module is None:
        raise UsageError(f"{what}() comes after prepare(): there is no model yet")
    return strategy.module


def _nothing() -> None:
    pass


def _together(strategy: Strategy, action: Callable[[], _Result]) -> _Result:
    """Do something on every rank; what fails on one is raised on all."""
    result: list[_Result] = []
    failure: PacelineError | None = None
    try:
        result.append(action())
    except PacelineError as error:
        failure = error
    failures = strategy._ranks.exchange(None if failure is None else str(failure))
    if failure is not None:
        raise failure
    for rank, text in enumerate(failures):
        if text is not None:
            raise ModelError(f"rank {rank}: {text}")
    return result[0]


# The model.


def _state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by name; embeddings' anchors, which hold nothing, aside."""
    return {
        name: tensor.detach()
        for name, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor) and tensor.numel()
    }


def _encode(tensors: dict[str, torch.Tensor]) -> bytes:
    from safetensors.torch import save as encode

    # A clone of each: tied weights share memory, which the format does not know.
    return encode({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()})


def _read(
    strategy: Strategy, module: nn.Module, directory: str | os.PathLike[str]
) -> tuple[SavedModel, dict[str, torch.Tensor], dict[int, dict[str, Any]]]:
    """Read a checkpoint, and see that it is of this model and this optimizer."""
    from safetensors.torch import load as decode

    saved = read_model(directory)
    description = saved.manifest.model
    if description.get("kind") != KIND:
        raise ModelError(f"{directory} holds tables and no checkpoint of a PyTorch model: load it with client.load()")
    values = decode(saved.read(saved.manifest.tensors["model"]))
    _check_same({name: _shape(tensor) for name, tensor in values.items()}, _state_of(module), directory)
    tables = {table.spec.name for table in saved.manifest.tables}
    wanted = set(strategy.embedder.tables) if strategy.embedder is not None else set()
    if tables != wanted:
        raise ModelError(
            f"the checkpoint in {directory} has the embeddings {sorted(tables)}, this model has {sorted(wanted)}: "
            "build the model that was saved"
        )
    state: dict[int, dict[str, Any]] = {}
    kept = description.get("optimizer")
    if strategy.optimizer is not None and kept is not None:
        if kept["class"] != type(strategy.optimizer).__name__:
            raise ModelError(
                f"the checkpoint in {directory} was saved with {kept['class']}, this program has "
                f"{type(strategy.optimizer).__name__}: make the same optimizer"
            )
        groups = _names(module, strategy.optimizer)
        if groups != [group["params"] for group in kept["groups"]]:
            raise ModelError(
                f"the checkpoint in {directory} has other parameter groups than this optimizer: make the same groups"
            )
        flat = decode(saved.read(saved.manifest.tensors["optimizer"]))
        state = _unflatten(flat, kept["numbers"], [name for group in groups for name in group])
    return saved, values, state


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _check_same(found: dict[str, str], own: dict[str, torch.Tensor], directory: str | os.PathLike[str]) -> None:
    wanted = {name: _shape(tensor) for name, tensor in own.items()}
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise ModelError(
                f"the checkpoint in {directory} is of another model: {name!r} is {found.get(name, 'not there')} in it "
                f"and {wanted.get(name, 'not there')} here; build the model that was saved"
            )


# The optimizer.


def _names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the optimizer's parameters, by group; ``#number`` for one that the module does not have."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    count = itertools.count()
    return [
        [names.get(id(parameter), f"#{number}") for parameter, number in zip(group["params"], count, strict=False)]
        for group in optimizer.param_groups
    ]


def _flatten(state: dict[int, dict[str, Any]], names: list[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split an optimizer's state into tensors and what is none, by ``parameter/entry``; `names` by number."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    for number, entries in state.items():
        for entry, value in entries.items():
            key = f"{names[number]}/{entry}"
            if isinstance(value, torch.Tensor):
                tensors[key] = value
            else:
                numbers[key] = value
    return tensors, numbers


def _unflatten(
    tensors: dict[str, torch.Tensor], numbers: dict[str, Any], names: list[str]
) -> dict[int, dict[str, Any]]:
    state: dict[int, dict[str, Any]] = {}
    number_of = {name: number for number, name in enumerate(names)}
    for key, value in {**tensors, **numbers}.items():
        name, _, entry = key.rpartition("/")
        if name in number_of:
            state.setdefault(number_of[name], {})[entry] = value
    return state


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return what of a dictionary can be written as JSON, tensors as numbers; parameters and functions aside."""
    return dict(_plain_items(values))


def _plain_items(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key == "params":
            continue
        plain = value.tolist() if isinstance(value, torch.Tensor) else value
        try:
            msgspec.json.encode(plain)
        except (TypeError, ValueError):
            continue
        yield key, plain


def _like(own: Any, value: Any) -> Any:
    """Return a hyperparameter in the form that the optimizer has it: a tensor, a tuple, or as it is."""
    if isinstance(own, torch.Tensor):
        return torch.as_tensor(value, dtype=own.dtype, device=own.device)
    return tuple(value) if isinstance(own, tuple) else value


# The embeddings.


def _load_tables(strategy: Strategy, saved: SavedModel) -> None:
    assert strategy.embedder is not None
    for table in saved.manifest.tables:
        own = strategy.embedder.tables[table.spec.name]
        if (own.spec.dim, own.spec.update["kind"]) != (table.spec.dim, table.spec.update["kind"]):
            raise ModelError(
                f"embedding {table.spec.name!r} was saved as {table.spec}, here it is {own.spec}: build the model that "
                "was saved, with the same optimizer"
            )
        if own.is_shared and not strategy.is_main:
            continue  # rank 0 writes for all
        own.clear()
        for keys, records in saved.records(table):
            own.write(keys, records)
