"""The tensors of a training's state, and their division into chunks for the transfer to newcomers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import UsageError
from paceline.kernels.checksum import xxh64
from paceline.protocol.healing import divide_state
from paceline.torch.strategies.base import Strategy

_CHECKSUM_BYTES: Final = 32
"""The kernel of the checksum accepts only multiples of this number of bytes."""
_LEAST_BYTES: Final = 1 << 16
"""Tensors of registered states with fewer bytes, such as a generator's state, are in no family."""


class StateTensors:
    """The tensors of one rank's state: of the model, the optimizers and the registered states.

    A *family* is a set of tensors with equal numbers of elements, such as a parameter and its optimizer state. Families
    are divided into chunks. The other tensors, which are usually small, are in no chunk.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.registered, registered = strategy.registered.encode()
        """The registered states without their tensors."""
        self.by_name: dict[str, torch.Tensor] = {}
        """All tensors. A tied parameter has only its first name."""
        self.options: list[Any] = []
        """Optimizer state that is not a tensor: number of the optimizer, number of the parameter, key and value."""
        families: dict[Any, list[str]] = {}
        for name, tensor in strategy.transferred_state().items():
            memory = _memory_key(tensor)
            if memory not in families:
                self.by_name[f"model/{name}"] = tensor
                if _is_dense(tensor):
                    families[memory] = [f"model/{name}"]
        for number, index, parameter in self._parameters():
            for key, value in strategy.optimizers[number].state.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor):
                    self.options.append([number, index, key, value])
                    continue
                self.by_name[f"optimizer/{number}/{index}/{key}"] = value
                if _is_dense(value) and value.numel() == parameter.numel():
                    families.setdefault(_memory_key(parameter), []).append(f"optimizer/{number}/{index}/{key}")
        self.num_updated = len(families)
        """The number of families of the model and the optimizers."""
        for name, tensor in registered.items():
            self.by_name[f"registered/{name}"] = tensor
            if _is_dense(tensor) and tensor.nbytes >= _LEAST_BYTES:
                families[name] = [f"registered/{name}"]
        self.families = list(families.values())
        """The names of each family's tensors. The families of registered states are the last ones."""
        self.rest = self.by_name.keys() - {name for family in self.families for name in family}
        """The names of the tensors in no family."""

    def _parameters(self) -> Iterable[tuple[int, int, torch.nn.Parameter]]:
        """Yield each optimizer's number with the number and the value of each of its parameters."""
        for number, optimizer in enumerate(self._strategy.optimizers):
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            yield from ((number, index, parameter) for index, parameter in enumerate(parameters))

    def describe(self) -> dict[str, Any]:
        """Return the types of all tensors, and the other values, for :meth:`adopt` on a newcomer."""
        types = {
            name: [str(tensor.dtype).removeprefix("torch."), [*tensor.shape], [*tensor.stride()], tensor.is_cpu]
            for name, tensor in self.by_name.items()
        }
        return {
            "tensors": types, "families": self.families, "rest": sorted(self.rest), "options": self.options,
            "registered": self.registered, "sizes": self.chunks().sizes,
        }  # fmt: skip

    def adopt(self, description: dict[str, Any]) -> None:
        """Create the described tensors that this rank lacks, with undefined values. Drop other optimizer state.

        Created tensors of registered states only store the received values.
        """
        self.families, self.rest = description["families"], {*description["rest"]}
        parameters = {(number, index): parameter for number, index, parameter in self._parameters()}
        states: dict[tuple[int, int], dict[str, Any]] = {key: {} for key in parameters}
        for number, index, key, value in description["options"]:
            states[number, index][key] = value
        own_tensors, self.by_name = self.by_name, {}
        for name, (dtype, shape, strides, is_cpu) in description["tensors"].items():
            kind, _, path = name.partition("/")
            tensor = own_tensors.get(name)
            dtype = getattr(torch, dtype)
            if tensor is None or (tensor.dtype, [*tensor.shape], [*tensor.stride()]) != (dtype, shape, strides):
                if kind == "model":
                    raise UsageError(
                        f"the model of this rank differs from rank 0's model in the parameter or buffer {path!r}. "
                        "Create the same model on all ranks"
                    )
                device = torch.device("cpu") if kind == "registered" or is_cpu else self._strategy.storage
                tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            self.by_name[name] = tensor
            if kind == "optimizer":
                optimizer, parameter, key = path.split("/", 2)
                states[int(optimizer), int(parameter)][key] = tensor
        for (number, index), state in states.items():
            optimizer_state = self._strategy.optimizers[number].state
            optimizer_state.pop(parameters[number, index], None)
            if state:
                optimizer_state[parameters[number, index]] = state

    def chunks(self) -> StateChunks:
        return StateChunks([[self.by_name[name] for name in family] for family in self.families])


class StateChunks:
    """The memory of families of tensors, divided into chunks."""

    def __init__(self, families: Sequence[Sequence[torch.Tensor]]) -> None:
        self._families = [[(_memory_of(tensor), tensor.element_size()) for tensor in family] for family in families]
        item_bytes = [[size for _, size in family] for family in self._families]
        lengths = [family[0].numel() for family in families]
        self._chunks = [*divide_state([*zip(lengths, map(max, item_bytes), strict=True)])]
        self.sizes = [sum(item_bytes[chunk.family]) * (chunk.end - chunk.first) for chunk in self._chunks]
        """The number of bytes of each chunk."""

    def _memory(self, number: int) -> list[torch.Tensor]:
        family, first, end = self._chunks[number]
        return [memory[first * size : end * size] for memory, size in self._families[family]]

    def num_bytes(self, numbers: range) -> int:
        return sum(self.sizes[numbers.start : numbers.stop])

    def pack(self, numbers: Iterable[int], out: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy of chunks, on the CPU; with `out`, write it there."""
        return torch.cat([memory.cpu() for number in numbers for memory in self._memory(number)], out=out)

    def unpack(self, message: torch.Tensor, numbers: Iterable[int]) -> None:
        parts = [memory for number in numbers for memory in self._memory(number)]
        for memory, part in zip(parts, torch.split(message, [len(memory) for memory in parts]), strict=True):
            memory.copy_(part)

    def count_before(self, family: int) -> int:
        """Return the number of chunks of the families before `family`."""
        return sum(chunk.family < family for chunk in self._chunks)

    def checksums(self, numbers: Iterable[int]) -> npt.NDArray[np.uint64]:
        return np.array([_checksum(self._memory(number)) for number in numbers], np.uint64)


def _checksum(parts: Iterable[torch.Tensor]) -> int:
    checksums: list[int] = []
    for part in parts:
        data = part.cpu().numpy()
        whole = len(data) - len(data) % _CHECKSUM_BYTES
        tail = np.zeros(_CHECKSUM_BYTES, np.uint8)
        tail[: len(data) - whole] = data[whole:]
        arrays = [array.view(np.uint64) for array in (data[:whole], tail) if len(array)]
        checksums += [xxh64(array if array.flags.aligned else array.copy()) for array in arrays]
    return int(xxh64(np.array(checksums + [0] * (-len(checksums) % 4), np.uint64)))


def _memory_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.numel(), tensor.dtype


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a range of memory, in any order."""
    return tensor.numel() > 0 and tensor.stride() == torch.empty_like(tensor, device="meta").stride()


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor. A write to them causes no error in an unfinished backward pass."""
    return torch.as_strided(tensor.data, (tensor.numel(),), (1,)).view(torch.uint8)
