"""Check that a model computes each row independently and repeatably. A pipeline would change other models' results.
Shapes do not show whether the batch is in another dimension than the first (``batch_first=False``). So the first call
runs the rows of two microbatches through the model twice, together and separately, and compares the values.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.errors import UsageError
from paceline.torch.capture.graph import CallArguments, undone, unfold

_TOLERANCE: Final = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Results with a smaller difference, relative to the largest value, count as equal: about 100 times the rounding."""
_COARSE: Final = 0.05  # the tolerance for 16-bit dtypes


def check_repeatable(module: nn.Module, called: CallArguments) -> None:
    """Raise UsageError if two calls with the same batch differ in their results: a pipeline traces only one call."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    args, kwargs = called.fill(list(called.values.values()))
    for trains in (False, True):
        if trains and all(mode for _, mode in modes):
            return  # the first round was already in training mode
        states, outputs = [_state_of_python(module)], []
        try:
            for submodule, mode in modes:
                submodule.training = mode or trains
            for _ in range(2):
                with undone(module), torch.no_grad(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    outputs.append([leaf for leaf in unfold(module(*args, **kwargs))[0] if isinstance(leaf, Tensor)])
                states.append(_state_of_python(module))
        except UsageError:
            raise
        except Exception:  # the trace will raise this error with more details
            return
        finally:
            for submodule, mode in modes:
                submodule.training = mode
        _, (later_numbers, drawn, drawn_by_numpy), (last_numbers, *_) = states
        counts = [name for name, value in last_numbers.items() if later_numbers.get(name) not in (None, value)]
        cause = ""
        if (drawn, drawn_by_numpy) != states[0][1:]:
            cause = "draws from Python's or NumPy's random numbers: draw by torch.rand()"
        elif counts:
            cause = f"counts its calls in {counts[0]}: count in the training loop, and pass the number to the model"
        elif any(
            a.shape != b.shape or (a.is_floating_point() and _is_other(a, b)) for a, b in zip(*outputs, strict=True)
        ):
            cause = "has different results for one batch: make the result depend on arguments and buffers only"
        if cause:
            raise UsageError(
                f"the forward of {type(module).__name__} {cause}. The numbers of calls differ between a pipeline and "
                "one process"
            )


def _state_of_python(module: nn.Module) -> tuple[dict[str, Any], Any, Any]:
    attributes = [
        (f"{path}.{name}".lstrip("."), value)
        for path, submodule in module.named_modules()
        for name, value in vars(submodule).items()
    ]
    numbers = {name: value for name, value in attributes if type(value) in (int, float)}
    return numbers, random.getstate(), str(np.random.get_state(legacy=False))


def check_rows_independent(module: nn.Module, called: CallArguments, rows: int, part: int) -> None:
    """Raise UsageError if a model's output for `part` rows depends on later rows.

    The check runs in evaluation mode, in which BatchNorm and dropout compute rows independently. It skips models that
    fail or draw random numbers in this mode.
    """
    norms = [submodule for submodule in module.modules() if isinstance(submodule, _BatchNorm)]
    if 2 * part > rows or any(norm.running_mean is None for norm in norms):
        return
    both = _rows_of(called.values, rows, 0, 2 * part)
    trained = [submodule for submodule in module.modules() if submodule.training]
    with undone(module), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for submodule in trained:
            submodule.training = False
        try:
            together = _outputs(module, called, both)
            apart = [_outputs(module, called, _rows_of(called.values, rows, k * part, part)) for k in (0, 1)]
            if any(_are_other(whole, parts) for whole, *parts in zip(together, *apart, strict=True)):
                raise UsageError(_describe(module, called, together, both, rows, part))
        except UsageError:
            raise
        except Exception:  # the model may work in training mode
            return
        finally:
            for submodule in trained:
                submodule.training = True


class _DrawsError(Exception):
    """Raised if the model draws random numbers in evaluation mode."""


def _rows_of(values: Mapping[str, Tensor], rows: int, first: int, count: int) -> dict[str, Tensor]:
    return {
        name: value[first : first + count] if value.dim() and len(value) == rows else value
        for name, value in values.items()
    }


def _outputs(module: nn.Module, called: CallArguments, values: Mapping[str, Tensor]) -> list[Tensor]:
    args, kwargs = called.fill(list(values.values()))
    state = torch.get_rng_state()
    leaves, _ = unfold(module(*args, **kwargs))
    if not state.equal(torch.get_rng_state()):
        raise _DrawsError
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _are_other(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    shape, of_part = list(whole.shape), list(parts[0].shape)
    grown = [k for k, (a, b) in enumerate(zip(shape, of_part, strict=False)) if a != b]
    if len(grown) > 1:  # a result for each pair of rows, as in a contrastive model
        return True
    if not whole.is_floating_point() or not grown or shape[grown[0]] != 2 * of_part[grown[0]]:
        return False
    return _is_other(whole, torch.cat(list(parts), grown[0]))


def _is_other(a: Tensor, b: Tensor) -> bool:
    return _size(a.double() - b.double()) > _TOLERANCE.get(a.dtype, _COARSE) * _size(a)


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _describe(
    module: nn.Module,
    called: CallArguments,
    together: Sequence[Tensor],
    both: Mapping[str, Tensor],
    rows: int,
    part: int,
) -> str:
    cut = [name for name, value in called.values.items() if value.dim() and len(value) == rows]
    mixed = [name for name in cut if _matters(module, called, name, together, both, part)] or cut
    shapes = ", ".join(f"{name} {list(called.values[name].shape)}" for name in mixed)
    return (
        f"microbatches would change the result: the model's output for some rows of {shapes} depends on other rows. A "
        "pipeline cuts along the first dimension. If the batch is another dimension, put it first (batch_first=True, "
        "or transpose within the model). If the examples of a batch depend on each other, use another strategy, or "
        "--schedule gpipe --microbatches 1"
    )


def _matters(
    module: nn.Module,
    called: CallArguments,
    name: str,
    together: Sequence[Tensor],
    both: Mapping[str, Tensor],
    part: int,
) -> bool:
    """Return whether the second microbatch's rows of one argument change the output for the first microbatch's rows."""
    changed: Any = torch.cat([both[name][:part]] * 2)
    outputs = _outputs(module, called, {**both, name: changed})
    pairs = [pair for pair in zip(together, outputs, strict=True) if pair[0].is_floating_point() and pair[0].dim()]
    return any(_is_other(a[:part], b[:part]) for a, b in pairs)
