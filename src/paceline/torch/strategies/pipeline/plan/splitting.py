"""Cut a measured model into stages that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.strategies.stage_cuts import cut_stages
from paceline.torch.strategies.pipeline.plan.timeline import StageTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost(StageTimes):
    """The measured costs of one layer, for one microbatch."""

    name: str
    parameter_bytes: int = 0
    activation_bytes: int = 0
    """The memory that the layer keeps from its forward to its backward."""

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCost:
    """Times of a message between two ranks: until it is received, and until the sender can continue."""

    latency_s: float = 0.0
    seconds_per_byte: float = 0.0
    sending_s: float = 0.0
    sending_s_per_byte: float = 0.0
    agreement_s: float = 0.0
    """Time of a step's three exchanges between all ranks: two for the program's position, one for the loss."""

    def seconds(self, num_bytes: float) -> float:
        """Return the time from the beginning of a send to the end of the receive."""
        return self.latency_s + self.seconds_per_byte * num_bytes

    def sending(self, num_bytes: float) -> float:
        """Return the time that the sender is busy with a message."""
        return self.sending_s + self.sending_s_per_byte * num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimits:
    """The memory limits of a stage."""

    memory_bytes: int | None = None
    """Bytes per process; None: no limit."""
    bytes_per_parameter_byte: float = 2.0
    """Memory for parameters, gradients and optimizer state per byte of parameters."""
    in_flight: int = 1
    """Number of microbatches whose activations are in memory at the same time."""


def split_layers(
    layers: Sequence[LayerCost],
    num_stages: int,
    crossing_s: Callable[[int], float],
    limits: StageLimits = StageLimits(),
) -> list[int]:
    """Divide layers into stages so that the slowest stage is as fast as possible.

    Return the number of the first layer of each stage except stage 0. ``crossing_s(c)`` is the time to send the values
    that cross a cut before layer `c`, and to return the gradients (:func:`~paceline.strategies.stage_cuts.cut_stages`).

    Raises UsageError for more stages than layers, and if every split exceeds the memory limit.
    """
    count = len(layers)
    if num_stages > count:
        raise UsageError(
            f"{num_stages} stages were requested, and the model has no more than {count} layers that can be "
            "separated: use fewer stages"
        )
    cuts = cut_stages(
        [layer.seconds for layer in layers],
        num_stages,
        [0.0, *(crossing_s(cut) for cut in range(1, count))],
        [stage_bytes([layer], limits) for layer in layers],
        limits.memory_bytes,
    )
    if cuts is None:
        raise UsageError(_describe_shortage(layers, num_stages, limits))
    return cuts


def stage_bytes(layers: Sequence[LayerCost], limits: StageLimits) -> float:
    return sum(
        layer.parameter_bytes * limits.bytes_per_parameter_byte + layer.activation_bytes * limits.in_flight
        for layer in layers
    )


def _describe_shortage(layers: Sequence[LayerCost], num_stages: int, limits: StageLimits) -> str:
    assert limits.memory_bytes is not None
    largest = max(layers, key=lambda layer: stage_bytes([layer], limits))
    megabytes = 1 / 2**20
    return (
        f"the model does not fit: all of it takes {stage_bytes(layers, limits) * megabytes:.0f} MiB for parameters, "
        f"optimizer and activations, its largest layer {largest.name} takes "
        f"{stage_bytes([largest], limits) * megabytes:.0f} MiB, and each of {num_stages} stages may take "
        f"{limits.memory_bytes * megabytes:.0f} MiB; use more stages, more microbatches or more --stage-memory"
    )
