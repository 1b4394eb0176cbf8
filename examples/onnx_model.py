"""Predict with a deep model's exports: NumPy reads the weights, and an ONNX runtime computes the network.

    paceline train day1.tsv --model deepfm --save model
    paceline model export model weights.npz
    paceline model export model network.onnx
    python examples/onnx_model.py weights.npz network.onnx --model model --data day2.tsv

The model itself is used for two purposes: its `columns` are needed to read the data, and its predictions are compared.
The network runs in onnxruntime if this is installed, otherwise in the slow reference of the package onnx.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

import paceline
from paceline.data import Batch, open_dataset
from paceline.models.features.layout import RowLayout

Floats = npt.NDArray[np.float32]
Arrays = Mapping[str, npt.NDArray[Any]]


def rows_of(arrays: Arrays, table: str, keys: npt.NDArray[np.uint64]) -> Floats:
    """Return a table's rows for `keys` (float32 [keys, dim]). Missing rows are zeros."""
    known, values = arrays[f"{table}.keys"], arrays[f"{table}.values"]
    rows = np.zeros((len(keys), values.shape[1]), np.float32)
    at = np.searchsorted(known, keys)
    found = np.flatnonzero(np.append(known, np.uint64(0))[at] == keys)
    found = found[at[found] < len(known)]
    rows[found] = values[at[found]]
    return rows


def network_inputs(name: str, least: int, arrays: Arrays, batch: Batch, layout: RowLayout) -> tuple[Floats, Floats]:
    """Return the network's input (float32 [n, columns, dim]), and the rest of the margins (float32 [n])."""
    n = batch.num_examples
    values = np.ones(len(batch.keys), np.float32) if batch.values is None else batch.values
    examples = np.repeat(np.arange(n), np.diff(batch.indptr))
    weights = rows_of(arrays, name, batch.keys)[:, 0]
    has_factors = (weights != 0) & (rows_of(arrays, f"{name} counts", batch.keys)[:, 0] >= least)
    factors = rows_of(arrays, f"{name} factors", batch.keys) * (values * has_factors)[:, np.newaxis]
    of_columns = np.zeros((n, len(layout), factors.shape[1]), np.float32)
    np.add.at(of_columns, (examples, layout.fields_of(batch)), factors)
    linear = np.bincount(examples, weights * values, minlength=n) + arrays[f"{name}.bias"][0]
    return of_columns, linear.astype(np.float32)


def network_of(file: str) -> tuple[str, Callable[[Floats], Floats]]:
    """Return the name of the runtime, and a function from `factors` to `margins`."""
    if importlib.util.find_spec("onnxruntime") is not None:
        import onnxruntime  # type: ignore[import-not-found]

        run = onnxruntime.InferenceSession(file).run
        return "onnxruntime", lambda factors: run(["margins"], {"factors": factors})[0].reshape(-1)
    from onnx.reference import ReferenceEvaluator

    evaluate: Any = ReferenceEvaluator(onnx.load(file)).run
    return "the reference of onnx", lambda factors: np.reshape(evaluate(["margins"], {"factors": factors})[0], -1)


def main() -> None:
    """Predict with the exports, and compare with the model's predictions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights")
    parser.add_argument("network")
    parser.add_argument("--model", required=True, help="the directory that both were exported from")
    parser.add_argument("--data", required=True)
    arguments = parser.parse_args()

    metadata = {entry.key: entry.value for entry in onnx.load(arguments.network).metadata_props}
    name, least = metadata["paceline.model"], int(metadata["paceline.factor_min_count"])
    arrays: Arrays = np.load(arguments.weights)
    arrays = {key: arrays[key] for key in arrays}
    runtime, network = network_of(arguments.network)
    model = paceline.load(arguments.model)
    layout = RowLayout.of_data(model.format, model.columns)
    assert layout is not None
    assert list(layout.names) == json.loads(metadata["paceline.columns"])
    predictions = []
    with open_dataset([arguments.data], None, model.columns, needs_labels=False) as dataset:
        for batch in dataset.batches(4096):
            factors, linear = network_inputs(name, least, arrays, batch, layout)
            predictions.append(1 / (1 + np.exp(-(linear + network(factors)))))
    found = np.concatenate(predictions)
    difference = float(np.abs(found - model.predict(arguments.data)).max())
    print(f"{len(found):,} predictions by {runtime}: they differ from the model's by at most {difference:.1g}")


if __name__ == "__main__":
    main()
