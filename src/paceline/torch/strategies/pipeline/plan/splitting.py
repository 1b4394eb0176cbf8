"""Cut a model into stages: a dynamic program over contiguous ranges of measured layers. Pure.

Sources: Narayanan et al., "PipeDream", SOSP 2019, section 3.1 (minimize the time of the slowest stage, transfers
included); Zheng et al., "Alpa", OSDI 2022, section 5.2 (with m microbatches, a step takes the sum of all stages' times
plus m - 1 times the slowest stage's time).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
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
    that cross a cut before layer `c`, and to return the gradients. A stage's time is the sum of the times of its layers
    and of its two cuts. Among equally fast splits, choose one with the smallest total crossing time.

    Raises UsageError for more stages than layers, and if every split exceeds the memory limit.
    """
    count = len(layers)
    if num_stages > count:
        raise UsageError(
            f"{num_stages} stages were requested, and the model has no more than {count} layers that can be "
            "separated: use fewer stages"
        )
    seconds = [0.0, *itertools.accumulate(layer.seconds for layer in layers)]
    memory = [0.0, *itertools.accumulate(stage_bytes([layer], limits) for layer in layers)]
    crossing = [0.0, *(crossing_s(cut) for cut in range(1, count)), 0.0]
    worst = (float("inf"), float("inf"))
    # At the beginning of round s, best[j] describes the best split of the first j layers into s stages: the time of its
    # slowest stage, and the total crossing time of its cuts.
    best = [(0.0, 0.0), *[worst] * count]
    begins: list[list[int]] = []
    for stage in range(num_stages):
        following, begin = [worst] * (count + 1), [0] * (count + 1)
        for end in range(stage + 1, count - (num_stages - stage - 1) + 1):
            for first in range(end - 1, stage - 1, -1):
                if limits.memory_bytes is not None and memory[end] - memory[first] > limits.memory_bytes:
                    break  # a stage that begins earlier needs even more memory
                if best[first] == worst:
                    continue
                time = seconds[end] - seconds[first] + crossing[first] + crossing[end]
                candidate = (max(best[first][0], time), best[first][1] + crossing[first])
                if candidate < following[end]:
                    following[end], begin[end] = candidate, first
        best = following
        begins.append(begin)
    if best[count] == worst:
        raise UsageError(_describe_shortage(layers, num_stages, limits))
    cuts: list[int] = []
    end = count
    for begin in reversed(begins):
        end = begin[end]
        cuts.append(end)
    return cuts[-2::-1]


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
