"""Checkpoints: one format for every strategy and every number of ranks.

A checkpoint is a saved model as :mod:`~paceline.storage.model_directory` writes it: a manifest with checksums, the
embeddings' tables by key, and two files of tensors: the model's ``state_dict``, and the optimizer's state in torch's
own layout with parameters' names for numbers (``layer.weight/exp_avg``). Where the state lived, on servers or in ranks,
is not in it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from paceline.errors import ModelError, PacelineError, UsageError
from paceline.ps import RULES, SGD, from_fields
from paceline.ps.messages import TableSpec
from paceline.storage.model_directory import CHECKPOINT, SavedModel, read_model, save_model
from paceline.torch.strategies.base import Strategy, check_dense, state_of
from paceline.torch.strategies.json import from_json, like, to_json
from paceline.torch.update_rules import rule_of

_Result = TypeVar("_Result")


def save(strategy: Strategy, directory: str | os.PathLike[str], extra: dict[str, Any]) -> None:
    """See :meth:`Strategy.save`."""
    module, optimizers = _prepared(strategy, "save"), strategy.optimizers
    values = strategy.gather_values()
    states = [strategy.gather_optimizer_state(number) for number in range(len(optimizers))]
    _settle_rows(strategy)

    def write() -> None:
        tables = strategy.embedder.tables.values() if strategy.embedder is not None else ()
        _check_tensors(module)
        tensors = {"model": _encode(values)}
        description: dict[str, Any] = {"kind": CHECKPOINT, "extra": to_json(extra, "extra")}
        for number, (optimizer, state) in enumerate(zip(optimizers, states, strict=True)):
            names = _names(module, optimizer)
            groups = [{**group, "params": own} for group, own in zip(optimizer.param_groups, names, strict=True)]
            flat, numbers = _flatten(state, [name for own in names for name in own])
            tensors[_key("optimizer", number)] = _encode(flat)
            kept = {"class": type(optimizer).__name__, "groups": groups, "numbers": numbers}
            description[_key("optimizer", number)] = to_json(kept, "optimizer")
        for number, scheduler in enumerate(strategy.schedulers):
            description[_key("scheduler", number)] = to_json(scheduler.state_dict(), "scheduler")
        save_model(directory, ((table.spec, table.items()) for table in tables), description, tensors)

    _together(strategy, write if strategy.is_main else _nothing)


def load(strategy: Strategy, directory: str | os.PathLike[str]) -> dict[str, Any]:
    """See :meth:`Strategy.load`."""
    module, optimizers = _prepared(strategy, "load"), strategy.optimizers
    saved, description, values, states = _together(strategy, lambda: _read(strategy, module, directory))
    _settle_rows(strategy)
    strategy._scatter_values(values)
    for number, state in states.items():
        optimizer = optimizers[number]
        for group, kept in zip(optimizer.param_groups, description[_key("optimizer", number)]["groups"], strict=True):
            group.update(_options(group, kept))
        strategy._scatter_optimizer_state(state, number)
    for number, scheduler in enumerate(strategy.schedulers):
        there = description.get(_key("scheduler", number))
        if there is not None:
            scheduler.load_state_dict(like(scheduler.state_dict(), there))
    if strategy.embedder is not None:
        strategy.embedder.forget()
        _together(strategy, lambda: _load_tables(strategy, saved))
    extra: dict[str, Any] = description.get("extra", {})
    return extra


def _prepared(strategy: Strategy, what: str) -> nn.Module:
    if strategy.module is None:
        raise UsageError(f"{what}() comes after prepare(): there is no model yet")
    return strategy.module


def _key(kind: str, number: int) -> str:
    """Return the name in a checkpoint of the optimizer or scheduler `number`."""
    return f"{kind}_{number}" if number else kind


def _nothing() -> None:
    pass


def _together(strategy: Strategy, action: Callable[[], _Result]) -> _Result:
    """Do something on every rank; what fails on one is raised on all."""
    result: list[_Result] = []
    failure: Exception | None = None
    said: str | None = None
    try:
        result.append(action())
    except Exception as error:
        failure = error
        said = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
    failures = strategy._ranks.exchange(said)
    if failure is not None:
        raise failure
    for rank, text in enumerate(failures):
        if text is not None:
            raise ModelError(f"rank {rank}: {text}")
    return result[0]


def _settle_rows(strategy: Strategy) -> None:
    """Wait until what every rank has done to the rows of embeddings is done."""
    if strategy.embedder is not None:
        for table in strategy.embedder.tables.values():
            len(table)  # servers answer a rank in the order of its requests, so that its updates come first
    strategy.barrier()


# The model.


def _check_tensors(module: nn.Module) -> None:
    """Raise UsageError for a model whose state is more than tensors."""
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise UsageError(f"the model's {name!r} is of type {type(value).__name__}: a checkpoint holds tensors only")
    check_dense(module, "checkpoint: ")


def _encode(tensors: dict[str, torch.Tensor]) -> bytes:
    from safetensors.torch import save as encode

    # A clone of each: tied weights share memory, which the format does not know.
    return encode({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()})


def _read(
    strategy: Strategy, module: nn.Module, directory: str | os.PathLike[str]
) -> tuple[SavedModel, dict[str, Any], dict[str, torch.Tensor], dict[int, dict[int, dict[str, Any]]]]:
    """Read a checkpoint, and see that it is of this model and this optimizer: nothing is changed yet."""
    saved = read_model(directory)
    description: dict[str, Any] = saved.manifest.model
    if description.get("kind") != CHECKPOINT:
        raise ModelError(f"{directory} holds tables and no checkpoint of a PyTorch model: load it with client.load()")
    description = from_json(description)
    values = _decode(saved, "model")
    _check_tensors(module)
    _check_same({name: _shape(tensor) for name, tensor in values.items()}, state_of(module), directory)
    _check_tables(strategy, saved)
    states: dict[int, dict[int, dict[str, Any]]] = {}
    for number, optimizer in enumerate(strategy.optimizers):
        kept = description.get(_key("optimizer", number))
        if kept is not None:
            groups = _names(module, optimizer)
            _check_optimizer(optimizer, groups, kept, directory)
            names = [name for group in groups for name in group]
            states[number] = _unflatten(_decode(saved, _key("optimizer", number)), kept["numbers"], names)
    return saved, description, values, states


def _decode(saved: SavedModel, what: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load as decode

    file = saved.manifest.tensors.get(what)
    if file is None:
        raise ModelError(f"{saved.directory} is damaged: its manifest names no file of the {what}'s tensors")
    return decode(saved.read(file))


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


def _check_optimizer(
    optimizer: torch.optim.Optimizer, names: list[list[str]], kept: dict[str, Any], directory: str | os.PathLike[str]
) -> None:
    """See that a checkpoint's optimizer is of the class, the groups and, in each, the rule of this one."""
    own = type(optimizer).__name__
    if kept["class"] != own:
        raise ModelError(
            f"the checkpoint in {directory} was saved with {kept['class']}, this program has {own}: make the same "
            "optimizer"
        )
    if names != [group["params"] for group in kept["groups"]]:
        raise ModelError(
            f"the checkpoint in {directory} has other parameter groups than this optimizer: make the same groups"
        )
    for number, (group, other) in enumerate(zip(optimizer.param_groups, kept["groups"], strict=True)):
        ours, theirs = _rule_name(optimizer, group), _rule_name(optimizer, {**group, **_options(group, other)})
        if ours != theirs:
            raise ModelError(
                f"the checkpoint in {directory} was saved with {own} that did {theirs} in parameter group {number}, "
                f"this program's does {ours}: make the same optimizer, with the same options"
            )


def _options(group: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group's options as saved, each in the form that it has in the group."""
    return {key: like(group.get(key), value) for key, value in kept.items() if key != "params"}


def _rule_name(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    """Return what update rule an optimizer is, and with which state."""
    try:
        rule = rule_of(optimizer, group)
        return " with ".join([type(rule).__name__, *([rule.state_names] if rule.state_names else [])])
    except UsageError:
        return "what no rule of the servers does"


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


# The embeddings.


def _check_tables(strategy: Strategy, saved: SavedModel) -> None:
    """See that a checkpoint's tables are those of this model's embeddings."""
    own = strategy.embedder.tables if strategy.embedder is not None else {}
    there = {table.spec.name: table.spec for table in saved.manifest.tables}
    if there.keys() != own.keys():
        raise ModelError(
            f"the checkpoint in {saved.directory} has the embeddings {sorted(there)}, this model has {sorted(own)}: "
            "build the model that was saved"
        )
    for name, table in own.items():
        ours, theirs = table.spec, there[name]
        if strategy.optimizer is None and _is_stateless(ours):
            theirs = theirs.with_update(ours.update)  # rows are only read, whatever has updated them
        if _nature(theirs) != _nature(ours):
            raise ModelError(
                f"the checkpoint in {saved.directory} has embedding {name!r} as {there[name]}, this model has it as "
                f"{ours}: build the model that was saved, with the same optimizer"
            )


def _nature(spec: TableSpec) -> tuple[Any, ...]:
    rule = from_fields(RULES, spec.update)
    return spec.dim, spec.update["kind"], rule.states, rule.has_count, spec.initializer, spec.seed


def _is_stateless(spec: TableSpec) -> bool:
    return bool(spec.update["kind"] == SGD.__name__)


def _load_tables(strategy: Strategy, saved: SavedModel) -> None:
    assert strategy.embedder is not None
    for table in saved.manifest.tables:
        own = strategy.embedder.tables[table.spec.name]
        if own.is_shared and not strategy.is_main:
            continue  # rank 0 writes for all
        own.clear()
        for keys, records in saved.records(table):
            values = np.ascontiguousarray(records[:, : own.spec.dim]) if _is_stateless(own.spec) else records
            own.write(keys, values)
