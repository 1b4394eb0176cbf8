"""Run a graph that is split over devices. A segment starts when its inputs have arrived."""

from __future__ import annotations

import linecache
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any

import torch
from torch.utils import _pytree as pytree

from paceline.torch.capture.graph import CallArguments
from paceline.torch.device_threads import DeviceThreads, add_location
from paceline.torch.partitioning.graph import Arrivals, cut_graph
from paceline.torch.partitioning.measuring import MeasuredGraph, give_parameters, segment_module


class Program:
    """Runs the segments of a graph. It owns the segments' parameters, each on its device."""

    def __init__(
        self,
        measured: MeasuredGraph,
        devices: Sequence[torch.device],
        by_operation: Mapping[str, int],
        *,
        compile: bool | str,
    ) -> None:
        self.measured = measured
        self.compile = compile
        self.devices = tuple(devices)
        self._parameter_devices = _ParameterDevices(measured, by_operation)
        self.place()
        self.cut = cut_graph(measured.operations, self._parameter_devices.by_operation, measured.outputs)
        self._run_segments: list[Callable[..., list[Any]]] = []
        for segment in self.cut.segments:
            module = segment_module(measured, segment.operations, segment.inputs, segment.outputs)
            if compile:
                backend = "inductor" if compile is True else compile
                self._run_segments.append(torch.compile(module, backend=backend))
            else:
                self._run_segments.append(module.forward)  # a call of the module itself would print exceptions
        self._threads = DeviceThreads(self.devices, "part")

    @property
    def placement(self) -> dict[str, int]:
        """The device number of each module, parameter and buffer that an operation uses, by path."""
        measured, devices = self.measured, self._parameter_devices.by_operation
        return {
            measured.paths[name]: device
            for name, device in devices.items()
            if measured.nodes[name].op in ("call_module", "get_attr")
        }

    def place(self) -> None:
        """Move parameters and buffers to their devices. Parameters and buffers stay the same objects."""
        for tensor, device in self._parameter_devices.tensors():
            tensor.data = tensor.data.to(self.devices[device])
            if tensor.grad is not None:
                tensor.grad.data = tensor.grad.data.to(self.devices[device])

    def titles(self) -> list[str]:
        sizes = [0] * len(self.devices)
        for tensor, device in self._parameter_devices.tensors():
            sizes[device] += tensor.numel() * tensor.element_size()
        return [
            f"device {number}: {device}, {size:,} bytes of parameters and buffers"
            for number, (device, size) in enumerate(zip(self.devices, sizes, strict=True))
        ]

    def run(self, arguments: CallArguments) -> Any:
        call = _Call(self, self.measured.name_values(arguments))
        self._threads.run(call.work_on, len(self.devices), grad=torch.is_grad_enabled())
        return self.measured.captured.output.fill(lambda node: call.values[node.name])

    def run_segment(self, number: int, inputs: Sequence[Any]) -> list[Any]:
        """Return the outputs of a segment. Exceptions name the operation."""
        try:
            return self._run_segments[number](*inputs)
        except Exception as error:
            name = _raising_operation(error, self.cut.segments[number].operations)
            path = self.measured.paths.get(name, "")
            add_location(error, f"{name}, in {path}" if path and path != name else name)
            raise


class _ParameterDevices:
    """The devices of parameters and buffers: each is on the device of the first operation that uses it.

    Operations on other devices receive it by a transfer.
    """

    def __init__(self, measured: MeasuredGraph, by_operation: Mapping[str, int]) -> None:
        self.by_operation = dict(by_operation)
        self.by_path: dict[str, int] = {}
        self._device_of: dict[int, tuple[torch.Tensor, int]] = {}
        paths = {id(tensor): path for path, tensor in measured.tensors()}
        for operation in measured.operations:
            for tensor in measured.tensors_of(operation.name):
                _, home = self._device_of.setdefault(id(tensor), (tensor, self.by_operation[operation.name]))
                self.by_path.setdefault(paths[id(tensor)], home)
        for operation in measured.operations:
            self._give_away(measured, operation.name, paths)

    def tensors(self) -> list[tuple[torch.Tensor, int]]:
        return list(self._device_of.values())

    def _give_away(self, measured: MeasuredGraph, name: str, paths: Mapping[int, str]) -> None:
        module, device = measured.module_of(name), self.by_operation[name]
        if module is None:
            for tensor in measured.tensors_of(name):
                self.by_operation[name] = self._device_of[id(tensor)][1]
            return
        elsewhere = {
            name: paths[id(tensor)]
            for name, tensor in module.named_parameters()
            if self._device_of[id(tensor)][1] != device
        }
        if elsewhere:
            values = give_parameters(measured, name, elsewhere)
            self.by_operation.update(zip(values, (self.by_path[path] for path in elsewhere.values()), strict=True))


class _Call:
    """One run of a program: the values that were computed or received, and the segments that may run on each device."""

    def __init__(self, program: Program, arguments: Mapping[str, Any]) -> None:
        self._program = program
        self._arrivals = Arrivals(program.cut.segments)
        self._lock = threading.Lock()
        self._ready: list[queue.SimpleQueue[int | None]] = [queue.SimpleQueue() for _ in program.devices]
        """For each device, the numbers of the segments that may run; None ends the queue."""
        self.values: dict[str, Any] = dict(arguments)
        """Values by name, each on the device that computed it."""
        self._arrived: dict[tuple[str, int], Any] = {}
        for name, value in arguments.items():
            self._send(name, value)
        self._start(self._arrivals.first())

    def work_on(self, device: int) -> None:
        try:
            while (number := self._ready[device].get()) is not None:
                segment = self._program.cut.segments[number]
                inputs = [
                    self._arrived[name, device] if (name, device) in self._arrived else self.values[name]
                    for name in segment.inputs
                ]
                outputs = self._program.run_segment(number, inputs)
                for name, value in zip(segment.outputs, outputs, strict=True):
                    self.values[name] = value
                    self._send(name, value)
                with self._lock:
                    self._start(self._arrivals.ended(number))
        except BaseException:
            self._stop()
            raise

    def _send(self, name: str, value: Any) -> None:
        for number in self._program.cut.destinations.get(name, ()):
            to_device = methodcaller("to", self._program.devices[number], non_blocking=True)
            self._arrived[name, number] = pytree.tree_map_only(torch.Tensor, to_device, value)

    def _start(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._ready[self._program.cut.segments[number].device].put(number)
        if not self._arrivals.num_left:
            self._stop()

    def _stop(self) -> None:
        for ready in self._ready:
            ready.put(None)


def _raising_operation(error: Exception, operations: Sequence[str]) -> str:
    """Return the operation that raised the error. If it is unknown, return the first and the last operation."""
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_filename.startswith("<eval_with_key>"):  # each line of this code computes one operation
            name = linecache.getline(code.co_filename, traceback.tb_lineno).partition(" = ")[0].strip()
            if name in operations:
                return name
        traceback = traceback.tb_next
    return operations[0] if len(operations) == 1 else f"{operations[0]} to {operations[-1]}"
