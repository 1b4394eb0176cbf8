"""Values of features brought to one scale, so that a learning rate suits all of them.

Files without columns (libsvm) say nothing of what their numbers are: ages, sums of money and shares may stand side by
side. From a sample of the examples a :class:`KeyScaling` is found, which is a part of the data set's description and of
the saved model; readers apply it to all that they read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.data.batch import Batch
from paceline.errors import UsageError

_LEAST_SEEN = 8
_MAX_KEYS = 1 << 16
_SAME = 2.0**0.5
_CENTRED_SHARE = 0.5
_MOST = 1000.0  # a wild value far beyond all that the sample has would undo what was learned


@dataclass(frozen=True, slots=True, eq=False)
class KeyScaling:
    """How values are changed: (value - mean) / scale.

    `keys` uint64 [n], rising; `means` and `scales` float64 [n]; the values of other keys are divided by `other_scale`.
    `fields` uint32 [n] are the fields of the keys, where these have any.
    What is more than 1,000 scales away counts as 1,000. A key whose mean is not 0 is *centred*: examples that lack it
    have the value 0, and get it as 0 - mean.
    """

    keys: npt.NDArray[np.uint64]
    means: npt.NDArray[np.float64]
    scales: npt.NDArray[np.float64]
    other_scale: float
    fields: npt.NDArray[np.uint32] | None = None
    _centred: npt.NDArray[np.int64] = field(init=False, repr=False)
    _place: npt.NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        n = len(self.keys)
        lengths = {n, len(self.means), len(self.scales), n if self.fields is None else len(self.fields)}
        if not (len(lengths) == 1 and (self.scales > 0).all() and self.other_scale > 0):
            raise UsageError(f"a scaling has a mean and a positive scale for each of its {n} keys")
        if n > 1 and not (self.keys[1:] > self.keys[:-1]).all():
            raise UsageError("the keys of a scaling rise, and none occurs twice")
        object.__setattr__(self, "_centred", np.flatnonzero(self.means))
        place = np.full(n + 1, -1, np.int64)
        place[self._centred] = np.arange(len(self._centred))
        object.__setattr__(self, "_place", place)

    def apply(self, batch: Batch) -> Batch:
        """Return the examples with their values changed; centred keys come first in every row."""
        values = np.ones(len(batch.keys)) if batch.values is None else batch.values.astype(np.float64)
        at = self._find(batch.keys)
        means, scales = np.append(self.means, 0.0)[at], np.append(self.scales, self.other_scale)[at]
        scaled = np.clip((values - means) / scales, -_MOST, _MOST).astype(np.float32)
        if not len(self._centred):
            return replace(batch, values=scaled)
        return self._with_centred(batch, self._place[at], scaled)

    def unscaled(
        self, keys: npt.NDArray[np.uint64], weights: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return the weights for values as they were, and what the bias gets more.

        `keys` uint64 [n] and `weights` float32 [n, dim] are those of a linear model of scaled values.
        """
        at = self._find(keys)
        means, scales = np.append(self.means, 0.0)[at], np.append(self.scales, self.other_scale)[at]
        weights = weights / scales[:, np.newaxis]
        return weights.astype(np.float32), -(weights * means[:, np.newaxis]).sum(axis=0).astype(np.float32)

    def _find(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return the place of each key among those of the scaling; one behind the last where it is none."""
        at = np.searchsorted(self.keys, keys)
        if len(self.keys):
            at[self.keys[np.minimum(at, len(self.keys) - 1)] != keys] = len(self.keys)
        return at

    def _with_centred(self, batch: Batch, place: npt.NDArray[np.int64], scaled: npt.NDArray[np.float32]) -> Batch:
        n, width = batch.num_examples, len(self._centred)
        row = np.repeat(np.arange(n), np.diff(batch.indptr))
        is_centred = place >= 0
        dense = np.tile((-self.means / self.scales)[self._centred].astype(np.float32), (n, 1))
        dense[row[is_centred], place[is_centred]] = scaled[is_centred]
        others = ~is_centred
        num_others = np.bincount(row[others], minlength=n)
        indptr = np.zeros(n + 1, np.int64)
        np.cumsum(num_others + width, out=indptr[1:])
        keys, values = np.empty(indptr[-1], np.uint64), np.empty(indptr[-1], np.float32)
        of_centred = indptr[:-1, np.newaxis] + np.arange(width)
        keys[of_centred], values[of_centred] = self.keys[self._centred], dense
        of_others = np.flatnonzero(others)
        to = np.arange(len(of_others)) + (row[of_others] + 1) * width
        keys[to], values[to] = batch.keys[of_others], scaled[of_others]
        fields = None
        if batch.fields is not None and self.fields is not None:
            fields = np.empty(indptr[-1], np.uint32)
            fields[of_centred], fields[to] = self.fields[self._centred], batch.fields[of_others]
        return Batch(batch.labels, indptr, keys, values, batch.weights, fields)

    def spec(self) -> dict[str, Any]:
        """A plain description, from which :meth:`from_spec` makes the same scaling."""
        return {
            "keys": self.keys.tolist(),
            "means": self.means.tolist(),
            "scales": self.scales.tolist(),
            "other_scale": self.other_scale,
            "fields": None if self.fields is None else self.fields.tolist(),
        }

    def digest(self) -> str:
        """A text that no other scaling has."""
        parts = (self.keys, self.means, self.scales, np.float64(self.other_scale))
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:32]

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> KeyScaling:
        """Return the scaling that :meth:`spec` described. Raises UsageError if it is none."""
        try:
            keys = np.array(spec["keys"], np.uint64)
            means, scales = np.array(spec["means"], np.float64), np.array(spec["scales"], np.float64)
            fields = None if spec.get("fields") is None else np.array(spec["fields"], np.uint32)
            return cls(keys, means, scales, float(spec["other_scale"]), fields)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"this describes no scaling of values: {error!r}") from None


def read_key_scaling(described: Mapping[str, Any]) -> KeyScaling | None:
    """Return the scaling that the description of a model or of a data set has, or None. Raises UsageError."""
    scaling = described.get("scaling")
    return None if scaling is None else KeyScaling.from_spec(scaling)


def find_key_scaling(batch: Batch) -> KeyScaling | None:
    """Return the scaling that suits examples like these; None where all values are 1, or as good as.

    A key's scale is the root of its mean square where it occurs, so signs and zeros stay. Keys in more than half of the
    examples whose values differ are standardised instead: mean 0, standard deviation 1. Keys that occur fewer than
    8 times get the scale that is the median of such keys, for they are usually of one kind.
    """
    if batch.values is None or not batch.num_examples:
        return None
    keys, ids = distinct_keys(batch.keys)
    values = batch.values.astype(np.float64)
    count = np.bincount(ids, minlength=len(keys))
    sums, squares = np.bincount(ids, values, len(keys)), np.bincount(ids, values * values, len(keys))
    scales = np.sqrt(squares / count)
    scales[scales == 0] = 1.0
    is_rare = count < _LEAST_SEEN
    other_scale = float(np.median(scales[is_rare] if is_rare.any() else scales))
    if abs(np.log2(other_scale)) < 0.5:
        other_scale = 1.0
    n = batch.num_examples
    is_two_valued = np.isclose(sums * sums, squares * count, rtol=1e-11, atol=0)  # one value besides 0
    deviations = np.sqrt(np.maximum(squares / n - (sums / n) ** 2, 0.0))
    centred = (count > _CENTRED_SHARE * n) & ~is_two_valued & (deviations > 1e-6 * scales)
    means = np.where(centred, sums / n, 0.0)
    scales = np.where(centred, deviations, scales)
    listed = np.flatnonzero(centred | (~is_rare & (np.abs(np.log2(scales / other_scale)) > np.log2(_SAME))))
    if len(listed) > _MAX_KEYS:
        listed = listed[np.argsort(-count[listed], kind="stable")[:_MAX_KEYS]]
    listed = listed[np.argsort(keys[listed])]
    if not len(listed) and other_scale == 1.0:
        return None
    fields = None
    if batch.fields is not None:
        of_keys = np.empty(len(keys), np.uint32)
        of_keys[ids] = batch.fields
        fields = of_keys[listed]
    return KeyScaling(keys[listed], means[listed], scales[listed], other_scale, fields)


def distinct_keys(keys: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32]]:
    """Return the distinct keys (uint64 [m]) in order of first appearance, and the number of each key (int32 [n])."""
    from paceline.kernels.dedup import dedup, scratch_size

    unique, ids = np.empty(len(keys), np.uint64), np.empty(len(keys), np.int32)
    count = dedup(keys, np.empty(scratch_size(len(keys)), np.int32), unique, ids)
    return unique[:count], ids
