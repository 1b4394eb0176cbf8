"""Split a model's graph over the devices of one process. Calls and training of the model do not change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from paceline.errors import UsageError
from paceline.torch.capture.graph import CallArguments
from paceline.torch.partitioning.drawing import describe_cut, draw_cut
from paceline.torch.partitioning.graph import CutGraph
from paceline.torch.partitioning.measuring import MeasuredGraph, bind_call, measure_graph
from paceline.torch.partitioning.placing import TransferTimes, check_together, place_by_name, place_evenly, plan
from paceline.torch.partitioning.program import Program


def partition(
    model: nn.Module,
    example: Any,
    devices: Sequence[str | torch.device],
    placement: Mapping[str, int | str | torch.device] | None = None,
    *,
    memory: Sequence[int] | None = None,
    compile: bool | str = False,  # PyTorch's users know this name, although it shadows the built-in function
) -> PartitionedModel:
    """Split a model's graph over several devices of this process, and return a model with the same behavior.

    `example` has the arguments of a call: a tensor, a tuple of positional arguments, or a dictionary of keyword
    arguments. A device may occur several times in `devices`. Each entry has a thread. `placement` maps names of modules
    and operations to devices or to indexes of `devices`, as in ``{"encoder": 0, "decoder": "cuda:1"}``. The device of a
    module applies to everything inside the module. Other operations run on the device of their inputs. Without
    `placement`, a planner measures the operations with `example`, and chooses devices for a short forward. Each device
    gets about the same number of bytes of parameters or, with `memory`, at most the given number of bytes. With
    `compile` (True, or the name of a backend), ``torch.compile`` compiles each segment.

    The parameters move to their devices and stay the same objects, so an existing optimizer remains valid. An output is
    on the device that computed it. Outputs, gradients and the CPU's random numbers equal those of the original model.

    Raises UsageError for a model without a graph, an unknown name or device, and parameters that do not fit.
    """
    all_devices = _checked_devices(devices)
    args, kwargs = _arguments_of(example)
    arguments = bind_call(model, args, kwargs)
    measured = measure_graph(model, arguments)
    if placement is None:
        by_operation = _plan(measured, all_devices, memory)
    elif memory is None:
        by_operation = place_by_name(measured.operations, measured.paths, _numbered(placement, devices, all_devices))
        check_together(by_operation, _groups(measured, lambda name: _modules_and_buffers(measured, name)))
    else:
        raise UsageError("got both placement and memory, expected one of them. Memory limits apply only to the planner")
    return PartitionedModel(model, arguments, Program(measured, all_devices, by_operation, compile=compile))


def _checked_devices(devices: Sequence[str | torch.device]) -> tuple[torch.device, ...]:
    if isinstance(devices, (str, torch.device)) or not devices:
        raise UsageError(f"devices: got {devices!r}, expected a list such as ['cuda:0', 'cuda:1']")
    checked = []
    for device in devices:
        try:
            checked.append(torch.empty(0, device=device).device)
        except (RuntimeError, AssertionError) as error:  # torch's errors for an unsupported kind of device
            raise UsageError(f"devices: {device} cannot be used: {str(error).splitlines()[0]}") from None
    return tuple(checked)


def _arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, dict):
        return (), example
    return (example if isinstance(example, tuple) else (example,)), {}


def _numbered(
    placement: Mapping[str, int | str | torch.device],
    devices: Sequence[str | torch.device],
    checked: Sequence[torch.device],
) -> dict[str, int]:
    named = {str(device): number for number, device in reversed(list(enumerate(checked)))}
    named |= {str(device): number for number, device in reversed(list(enumerate(devices)))}
    numbers = {}
    for name, device in placement.items():
        number = device if isinstance(device, int) else named.get(str(device), -1)
        if not 0 <= number < len(checked):
            raise UsageError(
                f"placement of {name!r}: got {device!r}, expected one of {', '.join(map(str, devices))}, or an index "
                f"from 0 to {len(checked) - 1}"
            )
        numbers[name] = number
    return numbers


def _plan(measured: MeasuredGraph, devices: Sequence[torch.device], memory: Sequence[int] | None) -> dict[str, int]:
    groups = _groups(measured, measured.tensors_of)
    sizes = [_num_bytes(tensor for name in group for tensor in measured.tensors_of(name)) for group in groups]
    if memory is not None and len(memory) != len(devices):
        raise UsageError(f"memory: got {len(memory)} numbers, expected one of bytes for each of {len(devices)} devices")
    if memory is None:
        return place_evenly(measured.operations, measured.costs, groups, sizes, len(devices), TransferTimes())
    return plan(measured.operations, measured.costs, groups, sizes, memory, TransferTimes())


def _groups(measured: MeasuredGraph, held_by: Callable[[str], Iterable[Any]]) -> list[list[str]]:
    """Return groups of operations that share an object. `held_by` returns the objects of an operation."""
    leader: dict[int, int] = {}

    def leader_of(key: int) -> int:
        while leader.setdefault(key, key) != key:
            leader[key] = leader[leader[key]]
            key = leader[key]
        return key

    keys_by_operation = {
        operation.name: [id(held) for held in held_by(operation.name)] for operation in measured.operations
    }
    for keys in keys_by_operation.values():
        for key in keys:
            leader[leader_of(key)] = leader_of(keys[0])
    groups: dict[int, list[str]] = {}
    for name, keys in keys_by_operation.items():
        if keys:
            groups.setdefault(leader_of(keys[0]), []).append(name)
    return list(groups.values())


def _modules_and_buffers(measured: MeasuredGraph, name: str) -> list[Any]:
    module = measured.module_of(name)
    return [] if module is None else [module, *module.buffers()]


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    distinct = {id(tensor): tensor for tensor in tensors}
    return sum(tensor.numel() * tensor.element_size() for tensor in distinct.values())


class PartitionedModel(nn.Module):
    """A model on several devices, created by :func:`partition`.

    Parameters, buffers, submodules and ``state_dict`` are those of the original model, under the same names.
    """

    def __init__(self, model: nn.Module, example: CallArguments, program: Program) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self._whole = (model, example)  # in a tuple, so that nn.Module does not register the model as a submodule
        self.training = model.training
        self._submodules = list(model.named_modules())
        self._programs = {self._key(example): program}

    def __deepcopy__(self, memo: dict[int, Any]) -> PartitionedModel:
        twin = memo[id(self)] = PartitionedModel.__new__(PartitionedModel)
        twin.__dict__ = copy.deepcopy(self.__dict__, memo)
        return twin

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "a partitioned model cannot be pickled, because its graph belongs to this process. Save its state_dict(), "
            "and load it into a model before or after partition()"
        )

    @property
    def cut(self) -> CutGraph:
        """The segments and transfers of the graph."""
        return self._program().cut

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices, by number."""
        return self._program().devices

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's result; each output is on the device that computed it."""
        arguments = bind_call(self._whole[0], args, kwargs)
        return self._program(arguments).run(arguments)

    def describe(self) -> str:
        """Return the cut graph as text: each device's segments, with the values that they receive and send."""
        program = self._program()
        return describe_cut(program.cut, program.titles(), program.measured.shapes)

    def save_svg(self, path: str | Path) -> None:
        """Draw the cut graph as SVG: a column per device, segments from top to bottom in the order of execution."""
        program = self._program()
        Path(path).write_text(draw_cut(program.cut, program.titles(), program.measured.shapes), encoding="utf-8")

    def _program(self, arguments: CallArguments | None = None) -> Program:
        """Return the program for a call (None: the example). Other modes, constants or structures need another one."""
        model, example = self._whole
        arguments = arguments or example
        key = self._key(arguments)
        if key not in self._programs:
            measured, other = measure_graph(model, arguments), next(iter(self._programs.values()))
            known = set(measured.paths.values())
            placement = {path: device for path, device in other.placement.items() if path in known}
            by_operation = place_by_name(measured.operations, measured.paths, placement)
            self._programs[key] = Program(measured, other.devices, by_operation, compile=other.compile)
        return self._programs[key]

    def _key(self, arguments: CallArguments) -> tuple[Any, ...]:
        model = self._whole[0]
        model.training = self.training
        modes = []
        for (name, known), module in zip_longest(self._submodules, model.modules(), fillvalue=("", None)):
            if module is not known:
                raise UsageError(
                    f"the model's modules have changed since it was partitioned, from {name or 'the end'!r} on: "
                    "partition the model again"
                )
            modes.append(module.training)
        return tuple(modes), tuple(arguments.values), *arguments.constants.items()

    @override
    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PartitionedModel:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._program().place()  # keep changes of dtypes, but move parameters back to their devices
        return self
