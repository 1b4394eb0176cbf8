"""Compute networks in PyTorch. Among the models' modules, only this one imports PyTorch.

A layer is float32 [units, inputs + 1]; the last column has the biases.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from paceline.tables.types import Floats

Network = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""A function from the columns' factors [n, columns, dim] and the layers to margins [n, 1]."""


def dense(inputs: Tensor, layer: Tensor) -> Tensor:
    """Return a layer's output [n, units] for inputs [n, inputs]."""
    return functional.linear(inputs, layer[:, :-1], layer[:, -1])


def perceptron(inputs: Tensor, layers: Sequence[Tensor]) -> Tensor:
    """Return the output of hidden layers, each followed by max(0, ·)."""
    for layer in layers:
        inputs = dense(inputs, layer).relu()
    return inputs


def sum_pairs(factors: Tensor) -> Tensor:
    """Return Σ ⟨e_a, e_b⟩ over pairs of columns, [n, 1], in linear time (Rendle, ICDM 2010, lemma 3.1)."""
    return (factors.sum(1).square() - factors.square().sum(1)).sum(1, keepdim=True) / 2


def cross_network(inputs: Tensor, layers: Sequence[Tensor]) -> Tensor:
    """Return x_L, with x_{l+1} = x_0 ⊙ (W_l x_l + b_l) + x_l (Wang et al., DCN V2, WWW 2021, equation 1)."""
    crossed = inputs
    for layer in layers:
        crossed = inputs * dense(crossed, layer) + crossed
    return crossed


def deepfm(factors: Tensor, layers: Sequence[Tensor]) -> Tensor:
    """Compute DeepFM. The last layer has one unit, whose inputs are the last hidden layer's outputs."""
    return dense(perceptron(factors.flatten(1), layers[:-1]), layers[-1]) + sum_pairs(factors)


def dcn(factors: Tensor, layers: Sequence[Tensor], num_cross: int) -> Tensor:
    """Compute DCN-v2 from `num_cross` cross layers, then hidden layers, then one unit whose inputs are both outputs."""
    inputs = factors.flatten(1)
    crossed = cross_network(inputs, layers[:num_cross])
    return dense(torch.cat([crossed, perceptron(inputs, layers[num_cross:-1])], 1), layers[-1])


class NetworkPass:
    """One forward pass of a minibatch through a network, with gradients.

    `margins`, float32 [n], is the output for `factors`, float32 [n, columns, dim].
    """

    def __init__(self, network: Network, factors: Floats, layers: Sequence[Floats]) -> None:
        self._leaves = [torch.from_numpy(array).requires_grad_() for array in (factors, *layers)]
        with _one_thread():
            self._output = network(self._leaves[0], self._leaves[1:]).squeeze(1)
        self.margins: Floats = self._output.detach().numpy()

    def gradients(self, residuals: Floats) -> list[Floats]:
        """Return the factors' and the layers' gradients, given the loss's derivatives with respect to the margins."""
        with _one_thread():
            found = torch.autograd.grad(self._output, self._leaves, torch.from_numpy(residuals))
        return [np.ascontiguousarray(gradient.numpy()) for gradient in found]


class _WithLayers(torch.nn.Module):
    """A network that owns its layers as parameters."""

    def __init__(self, network: Network, layers: Sequence[Floats]) -> None:
        super().__init__()
        self._network = network
        self._layers = torch.nn.ParameterList([torch.from_numpy(layer) for layer in layers])

    def forward(self, factors: Tensor) -> Tensor:
        return self._network(factors, list(self._layers))


def write_onnx(
    network: Network, layers: Sequence[Floats], num_columns: int, dim: int, file: Path, metadata: Mapping[str, str]
) -> None:
    """Write a network as an ONNX file.

    It maps `factors`, float32 [examples, columns, dim], to `margins`, float32 [examples, 1]. `metadata` is stored in
    the file. Requires the packages onnxscript and onnx.
    """
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the exporter warns about operators of missing packages
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's own deprecations
            program = torch.onnx.export(
                _WithLayers(network, layers).eval(),
                (torch.zeros(2, num_columns, dim),),
                dynamo=True,
                input_names=["factors"],
                output_names=["margins"],
                dynamic_shapes={"factors": {0: torch.export.Dim("examples")}},
                verbose=False,
            )
            assert program is not None
            program.model.metadata_props.update(metadata)
            program.save(file, external_data=False)
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limit PyTorch to this thread. On busy cores, PyTorch with more threads took 100 times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
