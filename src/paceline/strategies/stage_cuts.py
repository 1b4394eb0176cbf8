"""Cut a model into stages: a dynamic program over contiguous ranges of layers. Pure.

Sources: Narayanan et al., "PipeDream", SOSP 2019, section 3.1 (minimize the time of the slowest stage, transfers
included); Zheng et al., "Alpa", OSDI 2022, section 5.2 (with m microbatches, a step takes the sum of all stages' times
plus m - 1 times the slowest stage's time).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence


def cut_stages(
    layers_s: Sequence[float],
    num_stages: int,
    crossing_s: Sequence[float],
    memory: Sequence[float] = (),
    most_memory: float | None = None,
) -> list[int] | None:
    """Divide layers into stages so that the slowest stage is as fast as possible.

    Return the number of the first layer of each stage except stage 0. `layers_s` are the times of the layers, at least
    `num_stages`. ``crossing_s[c]`` is the time to send the values that cross a cut before layer `c`, and to return the
    gradients; ``crossing_s[0]`` is not used. A stage's time is the sum of the times of its layers and of its two cuts.
    Among equally fast divisions, choose one with the smallest total crossing time.

    With `most_memory`, the sum of the `memory` of a stage's layers is at most this number. Return None if no division
    is possible.
    """
    count = len(layers_s)
    seconds = [0.0, *itertools.accumulate(layers_s)]
    bytes_before = [0.0, *itertools.accumulate(memory)]
    crossing = [0.0, *crossing_s[1:count], 0.0]
    worst = (math.inf, math.inf)
    # At the beginning of round s, best[j] describes the best division of the first j layers into s stages: the time of
    # its slowest stage, and the total crossing time of its cuts.
    best = [(0.0, 0.0), *[worst] * count]
    begins: list[list[int]] = []
    for stage in range(num_stages):
        following, begin = [worst] * (count + 1), [0] * (count + 1)
        for end in range(stage + 1, count - (num_stages - stage - 1) + 1):
            for first in range(end - 1, stage - 1, -1):
                if most_memory is not None and bytes_before[end] - bytes_before[first] > most_memory:
                    break  # a stage that begins earlier needs even more memory
                time = seconds[end] - seconds[first] + crossing[end]
                if time > following[end][0]:
                    break  # a stage that begins earlier takes even longer
                if best[first] == worst:
                    continue
                candidate = (max(best[first][0], time + crossing[first]), best[first][1] + crossing[first])
                if candidate < following[end]:
                    following[end], begin[end] = candidate, first
        best = following
        begins.append(begin)
    if best[count] == worst:
        return None
    cuts, end = [], count
    for begin in reversed(begins):
        end = begin[end]
        cuts.append(end)
    return cuts[-2::-1]
