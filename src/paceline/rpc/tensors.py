"""PyTorch's tensors in calls; imported when the first one is sent or comes."""

from __future__ import annotations

from typing import Any

import torch
from msgspec.msgpack import Ext

from paceline.errors import ProtocolError
from paceline.rpc.codec import DTYPES, TENSOR, Decoding, Encoding, add_kind, cannot_send

_DTYPES = {name: getattr(torch, name) for name in ("bfloat16", *DTYPES) if hasattr(torch, name)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def _pack_tensor(encoding: Encoding, value: torch.Tensor) -> Any:
    if not value.is_cpu or value.layout is not torch.strided:
        where = f"of layout {value.layout}" if value.is_cpu else f"on {value.device}"
        raise cannot_send(f"it is a tensor {where}; send tensor.cpu(), or tensor.to_dense()")
    name = _NAMES.get(value.dtype)
    if name is None:
        raise cannot_send(f"it is a tensor of dtype {value.dtype}; {', '.join(_DTYPES)} are sent")
    data = value.detach() if value.requires_grad else value
    if data.is_conj() or data.is_neg():
        data = data.resolve_conj().resolve_neg()
    data = data.contiguous()
    encoding.add_array((data.view(torch.int16) if name == "bfloat16" else data).numpy())
    is_recorded = encoding.records and value.requires_grad
    if is_recorded:
        encoding.tensors.append(value)
    return Ext(TENSOR, encoding.nested((name, list(value.shape), is_recorded)))


def _unpack_tensor(decoding: Decoding, data: memoryview) -> torch.Tensor:
    name, shape, is_recorded = decoding.nested(data)
    if name == "bfloat16":
        tensor = torch.from_numpy(decoding.take_array("int16", shape)).view(torch.bfloat16)
    elif name in _DTYPES:  # what has no name in NumPy is refused there
        tensor = torch.from_numpy(decoding.take_array(name, shape))
    else:
        raise ProtocolError("got a tensor of a dtype that is not known here")
    if is_recorded is True:
        decoding.tensors.append(tensor.requires_grad_())
    return tensor


add_kind(TENSOR, (torch.Tensor, torch.nn.Parameter), _pack_tensor, _unpack_tensor)
