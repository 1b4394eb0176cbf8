"""Encode PyTorch tensors in calls. This module is imported when the first tensor is sent or received."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from msgspec.msgpack import Ext

from paceline.errors import ProtocolError, printable
from paceline.rpc.wire.codec import (
    DTYPES,
    OF_TORCH,
    TENSOR,
    CannotSendError,
    Decoding,
    Encoding,
    add_kind,
    add_pack,
    add_pack_of_subclasses,
)

_DTYPES = {name: getattr(torch, name) for name in ("bfloat16", *DTYPES) if hasattr(torch, name)}
_RESULTS = {
    name: kind
    for name, kind in vars(torch.return_types).items()
    if isinstance(kind, type) and issubclass(kind, tuple) and name == kind.__name__
}
"""The result types of torch's functions with several results, by name."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def _pack_tensor(encoding: Encoding, value: torch.Tensor) -> Any:
    if not value.is_cpu or value.layout is not torch.strided:
        where = f"of layout {value.layout}" if value.is_cpu else f"on {value.device}"
        raise CannotSendError(f"it is a tensor {where}; send tensor.cpu(), or tensor.to_dense()")
    name = _NAMES.get(value.dtype)
    if name is None:
        raise CannotSendError(f"it is a tensor of dtype {value.dtype}; {', '.join(_DTYPES)} are sent")
    if value.is_nested:
        raise CannotSendError("it is a nested tensor; send the list of its parts, tensor.unbind()")
    data = value.detach() if value.requires_grad else value
    if data.is_conj() or data.is_neg():
        data = data.resolve_conj().resolve_neg()
    data = data.contiguous()
    try:
        array = (data.view(torch.int16) if name == "bfloat16" else data).numpy()
    except RuntimeError as error:  # the tensor has no memory (torch._efficientzerotensor)
        raise CannotSendError(f"it is a tensor whose elements cannot be read: {printable(str(error), 200)}") from None
    encoding.add_array(array)
    is_recorded = encoding.records and value.requires_grad
    if is_recorded:
        encoding.tensors.append(value)
    return Ext(TENSOR, encoding.nested((name, list(value.shape), is_recorded)))


def _unpack_tensor(decoding: Decoding, data: memoryview) -> torch.Tensor:
    name, shape, is_recorded = decoding.nested(data)
    if name == "bfloat16":  # NumPy, and therefore take_array, does not support this dtype
        tensor = torch.from_numpy(decoding.take_array("int16", shape)).view(torch.bfloat16)
    elif name in _DTYPES:
        tensor = torch.from_numpy(decoding.take_array(name, shape))
    else:
        raise ProtocolError("got a tensor of an unknown dtype")
    if is_recorded is True:
        decoding.tensors.append(tensor.requires_grad_())
    return tensor


def _pack_of_torch(encoding: Encoding, value: Any) -> Any:
    shown = list(value) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
    return Ext(OF_TORCH, encoding.nested((type(value).__name__, shown)))


def _unpack_of_torch(decoding: Decoding, data: memoryview) -> Any:
    kind, shown = decoding.nested(data)
    if kind == "Size":
        return torch.Size(shown)
    if kind in _RESULTS:
        return _RESULTS[kind](shown)
    if not isinstance(shown, str):
        raise ProtocolError("got a device or a dtype without a name")
    found = _device(shown) if kind == "device" else getattr(torch, shown, None)
    if kind not in ("device", "dtype") or not isinstance(found, (torch.device, torch.dtype)):
        raise ProtocolError("got an unknown value of torch")
    return found


def _device(name: str) -> torch.device | None:
    with contextlib.suppress(RuntimeError):
        return torch.device(name)
    return None


def _pack_results(encoding: Encoding, value: Any) -> Any:
    return Ext(OF_TORCH, encoding.nested((type(value).__name__, encoding.pack_all(value))))


add_kind(OF_TORCH, (torch.device, torch.dtype, torch.Size), _pack_of_torch, _unpack_of_torch)
add_pack(tuple(_RESULTS.values()), _pack_results)
add_kind(TENSOR, (torch.Tensor, torch.nn.Parameter), _pack_tensor, _unpack_tensor)
add_pack_of_subclasses(torch.Tensor, _pack_tensor)
