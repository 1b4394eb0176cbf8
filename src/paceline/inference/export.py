"""Export a model for other programs: weights as NumPy arrays or as text (like Vowpal Wabbit's readable model), and the
network of a deep model as ONNX.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline.data.key_scaling import read_key_scaling
from paceline.errors import ModelError, UsageError
from paceline.inference.weights import LINEAR_MODELS, Weights, read_weights, split_bias
from paceline.models.base import SparseModel
from paceline.models.deep.base import DeepModel, load_networks
from paceline.models.fm import FactorModel
from paceline.models.registry import MODELS, read_model_settings
from paceline.models.stored import StoredModel, read_stored_model
from paceline.output_files import replacing

_BY_SUFFIX: Final = {".npz": "npz", ".onnx": "onnx"}
FORMATS: Final = ("npz", "text", "onnx")


def export_model(directory: str | os.PathLike[str], file: Path, format: str | None = None) -> int:
    """Write a model's nonzero weights to a file. Return the number of features with a weight (onnx: of weights).

    - ``npz``: arrays `keys` (uint64 [n]), `values` (float32 [n, dim]) and `bias` (float32 [dim]) per table, with the
      prefix ``TABLE.``. If the model scales values, the file also has `scaling.keys`, `scaling.means`, `scaling.scales`
      and `scaling.other_scale` (:class:`paceline.data.key_scaling.KeyScaling`). If it uses logarithms or bins, the file
      also has `scaling.units`, `scaling.filled`, `scaling.edges`, `scaling.edge_keys` (the key of each edge) and
      `scaling.bin_keys` (for each key, one more than its edges).
    - ``text``: a line ``Constant:WEIGHT`` for the bias and a line ``KEY:WEIGHT`` per feature, for models with one
    number per feature.
    - ``onnx``: the network of a deep model.

    If `format` is None, the file's suffix determines it. Raises UsageError if the model does not fit the format.
    """
    format = format or _BY_SUFFIX.get(file.suffix, "text")
    if format not in FORMATS:
        raise UsageError(f"--to {format}: expected {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    stored = read_stored_model(directory)
    if format == "onnx":
        return _export_network(stored, file)
    weights = {table.spec.name: read_weights(stored, table) for table in stored.tables}
    _add_initial_factors(stored, weights)
    tables = {name: _nonzero(table_weights) for name, table_weights in weights.items()}
    first = next(iter(tables.values()))
    if format == "text" and (len(tables) > 1 or first.values.shape[1] > 1):
        raise UsageError(f"{directory} has several numbers per feature, but text stores only one. Pass --to npz")
    try:
        with replacing(file) as aside, open(aside, "wb") as out:
            if format == "npz":
                arrays = {f"{name}.{part}": array for name, w in tables.items() for part, array in w._asdict().items()}
                np.savez(out, allow_pickle=False, **arrays, **_scaling_arrays(stored))
            else:
                out.write(_as_text(first).encode())
    except OSError as error:
        raise ModelError(f"cannot write the weights to {file}: {error.strerror or error}") from None
    return len(first.keys)


def _export_network(stored: StoredModel, file: Path) -> int:
    model = _read_settings(stored)
    if not isinstance(model, DeepModel) or model.layout is None:
        raise UsageError(
            f"the model in {stored.directory} is of kind {stored.described.get('kind')!r}, which has no network. "
            "Export it --to npz"
        )
    layers = []
    for layer in model.layers:
        layers.append(np.empty((layer.num_units, layer.num_inputs + 1), np.float32))
        stored.load_store(layer.name).pull(layer.keys, layers[-1])
    networks, num_columns = load_networks(model.name), len(model.layout)
    first = read_weights(stored, stored.tables[0])
    if importlib.util.find_spec("onnxscript") is None:
        raise UsageError("--to onnx needs onnxscript, which is not installed: pip install 'paceline[onnx]'")
    try:
        with replacing(file) as aside:
            networks.write_onnx(model.network, layers, num_columns, model.dim, aside, _describe_margin(model, first))
    except OSError as error:
        raise ModelError(f"cannot write the network to {file}: {error.strerror or error}") from None
    return sum(layer.size for layer in layers)


def _describe_margin(model: DeepModel, first: Weights) -> dict[str, str]:
    """Return an ONNX file's metadata, which explains how to compute predictions from the network's output."""
    assert model.layout is not None
    return {
        "paceline.model": model.name,
        "paceline.columns": json.dumps(model.layout.fields),
        "paceline.bias": f"{first.bias[0]:.9g}",
        "paceline.factor_min_count": str(model.factor_min_count),
        "paceline.prediction": "P(click) = 1 / (1 + exp(-margin)); margin = bias + sum of w[k] * x[k] over the "
        "features of an example + margins. factors[:, c] = sum of v[k] * x[k] over those features of column c, of "
        "paceline.columns (null: of all others), that have w[k] != 0 and a count of at least factor_min_count; 0 where "
        "there are none.",
    }


def _scaling_arrays(stored: StoredModel) -> dict[str, npt.NDArray[Any]]:
    """Return the scaling of values as arrays. There are none if the weights apply to unscaled values."""
    scaling = read_key_scaling(stored.described)
    if scaling is None or (scaling.is_linear and stored.described.get("kind") in LINEAR_MODELS):
        return {}
    names = ["keys", "means", "scales", "other_scale"]
    names += [name for name in ("units", "filled") if getattr(scaling, name) is not None]
    arrays = {name: np.array(getattr(scaling, name)) for name in names}
    if scaling.edges:
        edges = sorted(scaling.edges.items())
        arrays["edge_keys"] = np.array([key for key, key_edges in edges for _ in key_edges], np.uint64)
        arrays["edges"] = np.array([edge for _, key_edges in edges for edge in key_edges], np.float32)
        arrays["bin_keys"] = scaling.bin_keys
    return {f"scaling.{name}": array for name, array in arrays.items()}


def _read_settings(stored: StoredModel) -> SparseModel | None:
    return read_model_settings(stored.described) if stored.described.get("kind") in MODELS else None


def _add_initial_factors(stored: StoredModel, weights: dict[str, Weights]) -> None:
    """Add the factors of frequent features without a gradient: their initial values, which predictions use."""
    model = _read_settings(stored)
    if not isinstance(model, FactorModel):
        return
    first, factors, counts = (weights[table.name] for table in model.parameter_tables[:3])
    active, least = _nonzero(first).keys, model.value_of("factor_min_count")
    if least > 0:
        active = np.intersect1d(active, counts.keys[counts.values[:, 0] >= least])
    missing = np.setdiff1d(active, factors.keys)
    initial = np.empty((len(missing), factors.values.shape[1]), np.float32)
    name = model.parameter_tables[1].name
    stored.load_store(name).pull(missing, initial)
    keys, values = np.append(factors.keys, missing), np.concatenate([factors.values, initial])
    weights[name] = split_bias(keys, values)._replace(bias=factors.bias)


def _nonzero(weights: Weights) -> Weights:
    present = (weights.values != 0).any(axis=1)
    return Weights(weights.keys[present], weights.values[present], weights.bias)


def _as_text(weights: Weights) -> str:
    """Return the lines for the bias and the keys. Nine digits of a weight determine its float32."""
    lines = [f"Constant:{weights.bias[0]:.9g}"]
    lines += [
        f"{key}:{value:.9g}" for key, value in zip(weights.keys.tolist(), weights.values[:, 0].tolist(), strict=True)
    ]
    return "\n".join(lines) + "\n"
