"""Save and load checkpoints, in one format for every strategy and every number of ranks.

A checkpoint is a directory of :mod:`~paceline.storage.model_directory` with two files of tensors: the model's
``state_dict``, and the optimizer's state with names such as ``layer.weight/exp_avg``. Other values are JSON.
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
from paceline.torch.strategies.agreement import describe_other_names
from paceline.torch.strategies.base import Strategy, check_dense, state_of
from paceline.torch.strategies.json_values import from_json, like, to_json
from paceline.torch.update_rules import rule_of

_Result = TypeVar("_Result")


def save(strategy: Strategy, directory: str | os.PathLike[str], extra: dict[str, Any]) -> None:
    module, optimizers = _prepared(strategy, "save"), strategy.optimizers
    values = strategy.gather_values()
    states = [strategy.gather_optimizer_state(number) for number in range(len(optimizers))]
    positions = strategy._ranks.exchange([loader.state_dict() for loader in strategy.loaders])
    strategy._ranks.agree(strategy.registered.names, describe_other_names)
    _wait_for_rows(strategy)

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
            stored = {"class": type(optimizer).__name__, "groups": groups, "numbers": numbers}
            description[_key("optimizer", number)] = to_json(stored, "optimizer")
        for number, scheduler in enumerate(strategy.schedulers):
            description[_key("scheduler", number)] = to_json(scheduler.state_dict(), "scheduler")
        # Save the position of the rank that has received most batches: with `join`, ranks may have fewer batches.
        furthest = [
            max(places, key=lambda place: (place["epoch"], place["items"])) for places in zip(*positions, strict=True)
        ]
        description["loaders"] = to_json(furthest, "loaders")
        description["registered"], registered = strategy.registered.encode()
        if registered:
            tensors["registered"] = _encode(registered)
        save_model(directory, ((table.spec, table.items()) for table in tables), description, tensors)

    _together(strategy, write if strategy.is_main else lambda: None)


def load(strategy: Strategy, directory: str | os.PathLike[str]) -> dict[str, Any]:
    module, optimizers = _prepared(strategy, "load"), strategy.optimizers
    saved, description, values, states = _together(strategy, lambda: _read(strategy, module, directory))
    strategy._ranks.agree(strategy.registered.names, describe_other_names)
    _wait_for_rows(strategy)
    strategy._scatter_values(values)
    for number, state in states.items():
        optimizer = optimizers[number]
        for group, stored in zip(optimizer.param_groups, description[_key("optimizer", number)]["groups"], strict=True):
            group.update(options_of_group(group, stored))
        strategy._scatter_optimizer_state(state, number)
    for number, scheduler in enumerate(strategy.schedulers):
        scheduler_state = description.get(_key("scheduler", number))
        if scheduler_state is not None:
            scheduler.load_state_dict(like(scheduler.state_dict(), scheduler_state))
    for loader, position in zip(strategy.loaders, description.get("loaders", ()), strict=False):
        loader.load_state_dict(position)
    _together(strategy, lambda: _load_registered(strategy, saved, description.get("registered", {})))
    if strategy.embedder is not None:
        strategy.embedder.forget()
        _together(strategy, lambda: _load_tables(strategy, saved))
    extra: dict[str, Any] = description.get("extra", {})
    return extra


def _load_registered(strategy: Strategy, saved: SavedModel, states: dict[str, Any]) -> None:
    strategy.registered.load(states, _decode(saved, "registered") if "registered" in saved.manifest.tensors else {})


def _prepared(strategy: Strategy, method: str) -> nn.Module:
    if strategy.module is None:
        raise UsageError(f"{method}() needs a model: call prepare() first")
    return strategy.module


def _key(kind: str, number: int) -> str:
    return f"{kind}_{number}" if number else kind


def _together(strategy: Strategy, action: Callable[[], _Result]) -> _Result:
    """Call `action` on every rank; if it fails on one rank, raise the error on all ranks."""
    result: list[_Result] = []
    failure: Exception | None = None
    message: str | None = None
    try:
        result.append(action())
    except Exception as error:
        failure = error
        message = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
    failures = strategy._ranks.exchange(message)
    if failure is not None:
        raise failure
    for rank, text in enumerate(failures):
        if text is not None:
            raise ModelError(f"rank {rank}: {text}")
    return result[0]


def _wait_for_rows(strategy: Strategy) -> None:
    """Wait until the servers have applied every rank's updates to embeddings' rows."""
    if strategy.embedder is not None:
        for table in strategy.embedder.tables.values():
            len(table)  # this request is processed after the rank's updates
    strategy.barrier()


def _check_tensors(module: nn.Module) -> None:
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise UsageError(f"the model's {name!r} is of type {type(value).__name__}: a checkpoint holds tensors only")
    check_dense(module, "checkpoint: ")


def _encode(tensors: dict[str, torch.Tensor]) -> bytes:
    from safetensors.torch import save as encode

    # Clone each tensor: tied weights share memory, which the format does not support.
    return encode({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()})


def _read(
    strategy: Strategy, module: nn.Module, directory: str | os.PathLike[str]
) -> tuple[SavedModel, dict[str, Any], dict[str, torch.Tensor], dict[int, dict[int, dict[str, Any]]]]:
    """Read a checkpoint, and check that it fits this program's model and optimizer."""
    saved = read_model(directory)
    description: dict[str, Any] = saved.manifest.model
    if description.get("kind") != CHECKPOINT:
        raise ModelError(f"{directory} holds tables, not a checkpoint of a PyTorch model: load it with paceline.load()")
    description = from_json(description)
    values = _decode(saved, "model")
    _check_tensors(module)
    _check_same({name: _shape(tensor) for name, tensor in values.items()}, state_of(module), directory)
    _check_tables(strategy, saved)
    states: dict[int, dict[int, dict[str, Any]]] = {}
    for number, optimizer in enumerate(strategy.optimizers):
        stored = description.get(_key("optimizer", number))
        if stored is not None:
            groups = _names(module, optimizer)
            _check_optimizer(optimizer, groups, stored, directory)
            names = [name for group in groups for name in group]
            states[number] = _unflatten(_decode(saved, _key("optimizer", number)), stored["numbers"], names)
    return saved, description, values, states


def _decode(saved: SavedModel, kind: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load as decode

    file = saved.manifest.tensors.get(kind)
    if file is None:
        raise ModelError(f"{saved.directory} is damaged: its manifest has no file with the {kind}'s tensors")
    return decode(saved.read(file))


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _check_same(found: dict[str, str], own: dict[str, torch.Tensor], directory: str | os.PathLike[str]) -> None:
    expected = {name: _shape(tensor) for name, tensor in own.items()}
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise ModelError(
                f"the checkpoint in {directory} is of another model: {name!r} is {found.get(name, 'missing')} in the "
                f"checkpoint and {expected.get(name, 'missing')} here. Build the saved model"
            )


def _check_optimizer(
    optimizer: torch.optim.Optimizer, names: list[list[str]], stored: dict[str, Any], directory: str | os.PathLike[str]
) -> None:
    own = type(optimizer).__name__
    if stored["class"] != own:
        raise ModelError(
            f"the checkpoint in {directory} was saved with {stored['class']}, but this program has {own}: create the "
            "same optimizer"
        )
    if names != [group["params"] for group in stored["groups"]]:
        raise ModelError(
            f"the checkpoint in {directory} has other parameter groups than this optimizer: create the same groups"
        )
    for number, (group, other) in enumerate(zip(optimizer.param_groups, stored["groups"], strict=True)):
        own_rule, saved_rule = (
            _rule_name(optimizer, group),
            _rule_name(optimizer, {**group, **options_of_group(group, other)}),
        )
        if own_rule != saved_rule:
            raise ModelError(
                f"parameter group {number} of {own}: the checkpoint in {directory} has {saved_rule}, but this "
                f"program has {own_rule}. Create the same optimizer, with the same options"
            )


def options_of_group(group: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved options of a parameter group, in the types that the program's group uses."""
    return {key: like(group.get(key), value) for key, value in stored.items() if key != "params"}


def _rule_name(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str:
    try:
        rule = rule_of(optimizer, group)
        return " with ".join([type(rule).__name__, *([rule.state_names] if rule.state_names else [])])
    except UsageError:
        return "a rule that servers do not support"


def _names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the optimizer's parameters by group. A parameter outside the module is ``#number``."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    count = itertools.count()
    return [
        [names.get(id(parameter), f"#{number}") for parameter, number in zip(group["params"], count, strict=False)]
        for group in optimizer.param_groups
    ]


def _flatten(state: dict[int, dict[str, Any]], names: list[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Divide an optimizer's state into tensors and other values with the key ``parameter/entry``.

    `names[i]` is the name of parameter i.
    """
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


def _check_tables(strategy: Strategy, saved: SavedModel) -> None:
    own = strategy.embedder.tables if strategy.embedder is not None else {}
    saved_specs = {table.spec.name: table.spec for table in saved.manifest.tables}
    if saved_specs.keys() != own.keys():
        raise ModelError(
            f"the checkpoint in {saved.directory} has the embeddings {sorted(saved_specs)}, but this model has "
            f"{sorted(own)}: build the saved model"
        )
    for name, table in own.items():
        own_spec, saved_spec = table.spec, saved_specs[name]
        if strategy.optimizer is None and _is_stateless(own_spec):
            saved_spec = saved_spec.with_update(own_spec.update)  # rows are only read, so the rule is not used
        if _nature(saved_spec) != _nature(own_spec):
            raise ModelError(
                f"the checkpoint in {saved.directory} has embedding {name!r} as {saved_specs[name]}, but this model "
                f"has it as {own_spec}: build the saved model, with the same optimizer"
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
            continue  # rank 0 writes the rows that all ranks share
        own.clear()
        for keys, records in saved.records(table):
            values = np.ascontiguousarray(records[:, : own.spec.dim]) if _is_stateless(own.spec) else records
            own.write(keys, values)
