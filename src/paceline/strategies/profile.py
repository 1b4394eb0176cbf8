"""Describe the measured steps of a script. Predictions of its speed under other strategies use these measurements.

``paceline explain`` starts the script with the environment variable ``PACELINE_PROFILE``, and
:mod:`paceline.torch.strategies.measuring.profiling` measures the steps.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from paceline.errors import UsageError
from paceline.output_files import replacing
from paceline.transport import register_type

_Kind = TypeVar("_Kind")

STARTED: Final = "started"
"""The script creates an empty file with this name in the profile's folder when it reaches its training loop."""
COPIES: Final = "copies"
"""An empty file with this name in the profile's folder means that other copies of the script use the neighbouring
folders."""
TARGET: Final = "target"
"""A file with this name in the profile's folder has a loss at which the ranks end: see :func:`latest_loss`."""
LAST: Final = "last"
"""A file with this name in the profile's folder has the number of the last step, once a rank has reached the target."""
NUM_LATEST: Final = 10
WARM_UP, _LONGEST_WARM_UP = 3, 12
FEWEST_STEPS: Final = 3
"""A script with fewer measured steps is not measured."""
LEAST_STEPS: Final = 13
"""A script with fewer steps has no profile: three warm up, one measures memory, five measure the layers, one more warms
up, and three are measured as a whole.
"""
_OUTLIER: Final = 3.0
_MOST_SECONDS, _MOST_COUNT = 1e6, 1e13
"""The largest times and sizes in a record: 11 days, and 10 TB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """The cost of one layer in a step. A layer is a module with parameters of its own."""

    name: str
    forward_s: float
    """Seconds from the layer's call to the call of the next layer."""
    backward_s: float
    """Seconds of the backward from the gradients of the following layer to the gradients of this layer."""
    num_parameters: int = 0
    """Number of parameters (tensors, not elements) with a dense gradient."""
    parameter_bytes: int = 0
    """Bytes of these parameters, which are also the bytes of their gradients."""
    activation_bytes: int = 0
    """Bytes that the layer keeps from its forward to its backward."""
    output_bytes: int = 0
    """Bytes of the layer's result."""
    touched_rows: int = 0
    """Different rows of an embedding that a step looks up; 0 for other layers."""
    num_rows: int = 0
    """Number of rows of an embedding; 0 for other layers, and for embeddings of ``paceline.torch``."""
    row_bytes: int = 0
    """Bytes of a row of an embedding with sparse gradients; 0 for other layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """The measured cost of a script's step in one process. Times are in seconds, sizes in bytes."""

    layers: tuple[LayerProfile, ...]
    """The layers in the order of the forward."""
    steps_s: tuple[float, ...]
    """Durations of steps that were measured as a whole. Their differences are the variance of step times."""
    program_s: float
    """The program's own code, with reading data: the part of a step outside of forward, backward and update.

    The loss is a part of the last layer's forward.
    """
    update_s: float
    """The optimizer's update of all parameters."""
    batch_size: int
    """Examples per step of one process."""
    optimizer_bytes: int = 0
    buffer_bytes: int = 0
    """Buffers of the model, such as BatchNorm's statistics."""
    microbatch_s: float = 0.0
    """The additional time of each microbatch, if a batch is computed in several microbatches instead of at once."""
    spread: float = 1.0
    """The duration of the slowest tenth of the steps, divided by that of the fastest tenth."""
    stretch: float = 1.0
    """The duration of the steps, divided by their duration without waiting for a core that other threads use."""
    busy_cores: float = 1.0
    """The processor time of the layers, divided by their duration without waiting for a core; at least 1.

    Other parts of a step use one core.
    """
    is_on_gpu: bool = False

    @property
    def noise(self) -> float:
        """The factor by which other programs may have disturbed the measurement."""
        return max(self.spread, self.stretch)

    @property
    def parameter_bytes(self) -> int:
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def num_parameters(self) -> int:
        """Number of parameters (tensors) with a dense gradient."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def table_bytes(self) -> int:
        """Bytes of the embeddings with sparse gradients whose number of rows is known."""
        return sum(layer.num_rows * layer.row_bytes for layer in self.layers)

    @property
    def activation_bytes(self) -> int:
        return sum(layer.activation_bytes for layer in self.layers)

    @property
    def sparse_bytes(self) -> int:
        """Bytes of keys and rows in one message with the rows that a step looks up."""
        return sum(layer.touched_rows * (layer.row_bytes + 8) for layer in self.layers if layer.row_bytes)

    @property
    def sparse_rows(self) -> int:
        """The rows of a step in embeddings with sparse gradients."""
        return sum(layer.touched_rows for layer in self.layers if layer.row_bytes)

    @property
    def compute_s(self) -> float:
        """Seconds of a step without communication and without waiting: the sum of all parts."""
        return self.program_s + self.update_s + sum(layer.forward_s + layer.backward_s for layer in self.layers)

    def with_scaled_layers(self, factor: float) -> ModelProfile:
        """Return the profile with scaled times of the layers."""
        layers = tuple(
            replace(layer, forward_s=layer.forward_s * factor, backward_s=layer.backward_s * factor)
            for layer in self.layers
        )
        return replace(self, layers=layers)

    def scaled(self, factor: float) -> ModelProfile:
        """Return the profile with all parts scaled. The steps that were measured as a whole remain."""
        program_s, update_s = self.program_s * factor, self.update_s * factor
        return replace(self.with_scaled_layers(factor), program_s=program_s, update_s=update_s)

    def scaled_to_steps(self) -> ModelProfile:
        """Return the profile with all parts scaled, so that their sum is the mean of the steps without outliers."""
        return self.scaled(statistics.fmean(without_outliers(self.steps_s)) / max(self.compute_s, 1e-12))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The measured steps of one rank under a strategy."""

    rank: int
    batch_size: int
    steps_s: tuple[float, ...]
    ends_s: tuple[float, ...]
    """The end of each step, in seconds after the beginning of the first step."""
    losses: tuple[float | None, ...]
    """The loss of each step on the rank's own batch.

    None if it is not finite or above 1e300, or the program computed none.
    """
    step_bytes: float | None = None
    """Mean bytes that the rank sends and receives per step; None if they are not counted.

    Messages of collectives count as those of an algorithm that sends the fewest bytes, as if all ranks were remote.
    """
    staleness: float | None = None
    """The mean staleness of all ranks' pushes to the servers, in pushes; None on other ranks than rank 0."""

    def reached(self, target: float) -> int | None:
        """Return the number of the first step after which the latest loss is at most `target`; None if it is larger."""
        numbers = range(1, len(self.losses) + 1)
        return next((number for number in numbers if latest_loss(self.losses[:number]) <= target), None)


def warm_up_steps(num_steps: int) -> int:
    """Return the number of steps that warm up before `num_steps` measured ones, because the first steps are slower."""
    return min(max(num_steps // 5, WARM_UP), _LONGEST_WARM_UP)


def without_outliers(steps_s: Sequence[float]) -> list[float]:
    """Return the durations up to three times the median. A longer step includes an evaluation or a pause."""
    limit = _OUTLIER * statistics.median(steps_s)
    return [step_s for step_s in steps_s if step_s <= limit]


def latest_loss(losses: Sequence[float | None]) -> float:
    """Return the mean of the last ten losses; NaN if there are fewer, or one of them is None."""
    latest = [loss for loss in losses[-NUM_LATEST:] if loss is not None]
    return statistics.fmean(latest) if len(latest) == NUM_LATEST else math.nan


def write_record(path: Path, record: ModelProfile | StepRecord) -> None:
    """Write a record as JSON. A reader never finds an incomplete file."""
    with replacing(path) as aside:
        aside.write_bytes(msgspec.json.encode(record))


def read_record(path: Path, kind: type[_Kind]) -> _Kind:
    """Read a record that :func:`write_record` wrote. Raises UsageError for other contents, OSError without a file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=register_type(kind))
    except ValueError as error:  # MsgspecError is one, and so is UnicodeDecodeError
        raise UsageError(f"{path} was not written by this version of Paceline: {error}. Write it again") from None


def find_impossible(value: object, name: str = "") -> str | None:
    """Return a clause about the first number in a record that no measurement has; None without such a number.

    `value` is a dataclass, a dictionary, a sequence or a number, and `name` its place in the record.
    """
    if isinstance(value, (int, float)):
        most = _MOST_SECONDS if name.rpartition(".")[2].partition("[")[0].endswith("_s") else _MOST_COUNT
        is_possible, number = 0 <= value <= most, max(min(value, sys.float_info.max), -sys.float_info.max)
        return None if is_possible else f"{name} is {number:g}, but must be from 0 to {most:g}"
    parts: dict[str, object] = {}
    if isinstance(value, dict):
        parts = {f"{name}[{key!r}]": part for key, part in value.items()}
    elif isinstance(value, (tuple, list)):
        parts = {f"{name}[{number}]": part for number, part in enumerate(value)}
    elif is_dataclass(value):
        parts = {f"{name}.{field.name}".removeprefix("."): getattr(value, field.name) for field in fields(value)}
    return next((found for place, part in parts.items() if (found := find_impossible(part, place))), None)
