"""Scale values by key, so that one learning rate suits all features.

Files without columns (libsvm) do not describe their numbers: ages, amounts and shares may be in one file. A sample
of the examples determines a :class:`KeyScaling`. The scaling is stored with the data set's description and with the
saved model. Readers apply it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.data.batch import Batch
from paceline.data.scales.bins import KeyBins
from paceline.data.scales.numeric_features import NumericFeature
from paceline.data.scales.scaling import Scale, signed_logs
from paceline.errors import UsageError

_LEAST_SEEN = 8
_MAX_KEYS = 1 << 16
_SAME = 2.0**0.5
_CENTRED_SHARE = 0.5
_DTYPES: Final[dict[str, type[np.generic]]] = {
    "keys": np.uint64,
    "means": np.float64,
    "scales": np.float64,
    "fields": np.uint32,
    "units": np.float64,
    "filled": np.bool_,
}

_Entry: TypeAlias = tuple[float, float, float, bool, int]
"""A key's mean, scale and unit, whether it is filled, and its field."""


@dataclass(frozen=True, slots=True, eq=False)
class KeyScaling:
    """Scaling of values: (value - mean) / scale, limited to an absolute value of 1,000.

    `keys` uint64 [n], ascending; `means` and `scales` float64 [n]. Values of other keys are divided by `other_scale`.
    `fields` uint32 [n] are the fields of the keys; None without fields. A `filled` key (bool [n]; None: each key with a
    nonzero mean) is added to examples that lack it. Its value is the scaled value of 0.

    If a key has a unit u in `units` (float64 [n], 0 for none), its value x is first replaced by sign(x) log(1 + |x|/u).
    If a key has `edges` (float32, ascending), each range between them is a bin. A value becomes the feature of its bin,
    with value 1 and the key from :func:`paceline.data.scales.bins.key_bin_key`.
    """

    keys: npt.NDArray[np.uint64]
    means: npt.NDArray[np.float64]
    scales: npt.NDArray[np.float64]
    other_scale: float
    fields: npt.NDArray[np.uint32] | None = None
    units: npt.NDArray[np.float64] | None = None
    edges: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    filled: npt.NDArray[np.bool_] | None = None
    _filled: npt.NDArray[np.int64] = field(init=False, repr=False)
    _place: npt.NDArray[np.int64] = field(init=False, repr=False)
    _bins: KeyBins = field(init=False, repr=False)
    _bins_at: npt.NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        n = len(self.keys)
        optional = (array for array in (self.fields, self.units, self.filled) if array is not None)
        lengths = {n, len(self.means), len(self.scales), *map(len, optional)}
        if not (len(lengths) == 1 and (self.scales > 0).all() and self.other_scale > 0):
            raise UsageError(f"a scaling needs a mean and a positive scale for each of its {n} keys")
        if n > 1 and not (self.keys[1:] > self.keys[:-1]).all():
            raise UsageError("the keys of a scaling must ascend without duplicates")
        filled = np.flatnonzero(self.means if self.filled is None else self.filled)
        binned = np.array(sorted(self.edges), np.uint64)
        if not np.isin(binned, self.keys).all():
            raise UsageError("a key with bins must have a mean and a scale too")
        at = np.searchsorted(self.keys, binned)
        bins = KeyBins(binned, [self.edges[key] for key in binned.tolist()])
        object.__setattr__(self, "_filled", filled)
        object.__setattr__(self, "_place", _inverse(filled, n))
        object.__setattr__(self, "_bins", bins)
        object.__setattr__(self, "_bins_at", _inverse(at, n))

    @property
    def is_linear(self) -> bool:
        """Whether a linear model's weights for scaled values can be converted to weights for unscaled values."""
        return not self.edges and (self.units is None or not self.units.any())

    @property
    def bin_keys(self) -> npt.NDArray[np.uint64]:
        return self._bins.keys

    def nonlinear_scales(self) -> dict[int, Scale]:
        units = np.zeros(len(self.keys)) if self.units is None else self.units
        found = zip(self.keys.tolist(), units.tolist(), self.means.tolist(), self.scales.tolist(), strict=True)
        return {
            key: Scale(0.0, 0.0, 0.0, 0.0, self.edges[key]) if key in self.edges else Scale(unit, mean, scale)
            for key, unit, mean, scale in found
            if unit or key in self.edges
        }

    def apply(self, batch: Batch) -> Batch:
        """Return the scaled examples. In each row, filled keys come first."""
        values = np.ones(len(batch.keys)) if batch.values is None else batch.values.astype(np.float64)
        at = self._find(batch.keys)
        keys, scaled = self._changed(at, batch.keys, values)
        if not len(self._filled):
            return replace(batch, keys=keys, values=scaled)
        return self._with_filled(batch, self._place[at], keys, scaled)

    def unscaled(
        self, keys: npt.NDArray[np.uint64], weights: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Return the weights for unscaled values, and the amount to add to the bias.

        `weights` float32 [n, dim] belong to a linear model of scaled values. The scaling must be linear.
        """
        assert self.is_linear
        at = self._find(keys)
        means, scales = np.append(self.means, 0.0)[at], np.append(self.scales, self.other_scale)[at]
        weights = weights / scales[:, np.newaxis]
        return weights.astype(np.float32), -(weights * means[:, np.newaxis]).sum(axis=0).astype(np.float32)

    def _find(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return each key's index in the scaling's keys. For other keys, the index is the length of the scaling's
        keys."""
        at = np.searchsorted(self.keys, keys)
        if len(self.keys):
            at[self.keys[np.minimum(at, len(self.keys) - 1)] != keys] = len(self.keys)
        return at

    def _changed(
        self, at: npt.NDArray[np.int64], keys: npt.NDArray[np.uint64], values: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]:
        """Return scaled keys and values. `at` has the indices of the keys, `values` the unscaled float64 values."""
        from paceline.kernels.features.scaling import MOST_DEVIATIONS

        means, scales = np.append(self.means, 0.0)[at], np.append(self.scales, self.other_scale)[at]
        moved = values
        if self.units is not None:
            units = np.append(self.units, 0.0)[at]
            moved = np.where(units > 0, signed_logs(values, np.where(units > 0, units, 1.0)), values)
        scaled = np.clip((moved - means) / scales, -MOST_DEVIATIONS, MOST_DEVIATIONS).astype(np.float32)
        if self.edges:
            bins_at = self._bins_at[at]
            binned = np.flatnonzero(bins_at >= 0)
            keys = keys.copy()
            keys[binned] = self._bins.find(bins_at[binned], values[binned].astype(np.float32))
            scaled[binned] = 1.0
        return keys, scaled

    def _with_filled(
        self,
        batch: Batch,
        place: npt.NDArray[np.int64],
        found: npt.NDArray[np.uint64],
        scaled: npt.NDArray[np.float32],
    ) -> Batch:
        n, width = batch.num_examples, len(self._filled)
        row = np.repeat(np.arange(n), np.diff(batch.indptr))
        is_filled = place >= 0
        of_zero = self._changed(self._filled, self.keys[self._filled], np.zeros(width))
        dense_keys, dense = (np.tile(array, (n, 1)) for array in of_zero)
        to_dense = row[is_filled], place[is_filled]
        dense_keys[to_dense], dense[to_dense] = found[is_filled], scaled[is_filled]
        is_sparse = ~is_filled
        num_sparse = np.bincount(row[is_sparse], minlength=n)
        indptr = np.zeros(n + 1, np.int64)
        np.cumsum(num_sparse + width, out=indptr[1:])
        keys, values = np.empty(indptr[-1], np.uint64), np.empty(indptr[-1], np.float32)
        of_filled = indptr[:-1, np.newaxis] + np.arange(width)
        keys[of_filled], values[of_filled] = dense_keys, dense
        sparse = np.flatnonzero(is_sparse)
        to = np.arange(len(sparse)) + (row[sparse] + 1) * width
        keys[to], values[to] = found[sparse], scaled[sparse]
        fields = None
        if batch.fields is not None and self.fields is not None:
            fields = np.empty(indptr[-1], np.uint32)
            fields[of_filled], fields[to] = self.fields[self._filled], batch.fields[sparse]
        return Batch(batch.labels, indptr, keys, values, batch.weights, fields)

    def spec(self) -> dict[str, Any]:
        arrays = ((name, getattr(self, name)) for name in _DTYPES)
        spec = {name: array.tolist() for name, array in arrays if array is not None}
        edges = {"edges": [[key, list(edges)] for key, edges in sorted(self.edges.items())]} if self.edges else {}
        return {**spec, "other_scale": self.other_scale, **edges}

    def digest(self) -> str:
        parts: list[Any] = [self.keys, self.means, self.scales, np.float64(self.other_scale)]
        parts += [array for array in (self.units, self.filled) if array is not None]
        parts += [np.array([key, len(edges), *edges]) for key, edges in sorted(self.edges.items())]
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:32]

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> KeyScaling:
        try:
            arrays: dict[str, Any] = {
                name: np.array(spec[name], dtype) for name, dtype in _DTYPES.items() if spec.get(name) is not None
            }
            edges = {int(key): tuple(map(float, found)) for key, found in spec.get("edges", ())}
            return cls(**arrays, other_scale=float(spec["other_scale"]), edges=edges)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"the description of the scaling is invalid: {error!r}") from None


def _inverse(places: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.int64]:
    """Return the index in `places` of each number from 0 to n (int64 [n + 1]); -1 if `places` lacks the number."""
    found = np.full(n + 1, -1, np.int64)
    found[places] = np.arange(len(places))
    return found


def read_key_scaling(described: Mapping[str, Any]) -> KeyScaling | None:
    scaling = described.get("scaling")
    return None if scaling is None else KeyScaling.from_spec(scaling)


def find_key_scaling(batch: Batch) -> KeyScaling | None:
    """Return the scaling for examples like these; None if all or almost all values are 1.

    A key's scale is the root mean square of its values, so signs and zeros do not change. But a key is standardized to
    mean 0 and standard deviation 1 if it has several nonzero values and is in more than half of the examples. Keys
    that occur fewer than 8 times all get the median of their scales, because rare keys usually have similar numbers.
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
    is_two_valued = np.isclose(sums * sums, squares * count, rtol=1e-11, atol=0)  # the key has only one nonzero value
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


def with_scales(
    scaling: KeyScaling | None,
    features: Sequence[NumericFeature],
    scales: Sequence[Scale],
    *,
    absent_is_zero: bool,
) -> KeyScaling | None:
    """Return `scaling` with logarithms or bins for the features whose scales have them.

    Other features do not change. If `absent_is_zero`, examples that lack a feature with a logarithm or bins get it with
    the value 0.
    """
    changed = [(feature, scale) for feature, scale in zip(features, scales, strict=True) if scale.edges or scale.unit]
    if not changed:
        return scaling
    entries = {} if scaling is None else _entries(scaling)
    entries |= {
        feature.key: (scale.mean, scale.deviation or 1.0, scale.unit, absent_is_zero, feature.field or 0)
        for feature, scale in changed
    }
    edges = {feature.key: scale.centred_at(0.0).edges for feature, scale in changed if scale.edges}
    keys = sorted(entries)
    means, scales, units, filled, fields = zip(*(entries[key] for key in keys), strict=True)
    has_fields = any(feature.field is not None for feature in features)
    return KeyScaling(
        keys=np.array(keys, np.uint64),
        means=np.array(means, np.float64),
        scales=np.array(scales, np.float64),
        other_scale=1.0 if scaling is None else scaling.other_scale,
        fields=np.array(fields, np.uint32) if has_fields else None,
        units=np.array(units, np.float64),
        edges=edges,
        filled=np.array(filled, np.bool_),
    )


def _entries(scaling: KeyScaling) -> dict[int, _Entry]:
    n = len(scaling.keys)
    filled = scaling.means != 0 if scaling.filled is None else scaling.filled
    units = np.zeros(n) if scaling.units is None else scaling.units
    fields = np.zeros(n, np.uint32) if scaling.fields is None else scaling.fields
    parts = (array.tolist() for array in (scaling.means, scaling.scales, units, filled, fields))
    return dict(zip(scaling.keys.tolist(), zip(*parts, strict=True), strict=True))


def distinct_keys(keys: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32]]:
    """Return the distinct keys (uint64 [m]) in order of first occurrence, and each key's index in them (int32 [n])."""
    from paceline.kernels.dedup import dedup, scratch_size

    unique, ids = np.empty(len(keys), np.uint64), np.empty(len(keys), np.int32)
    count = dedup(keys, np.empty(scratch_size(len(keys)), np.int32), unique, ids)
    return unique[:count], ids
