"""What layers compute, in PyTorch: the only module of models that knows it.

A layer is float32 [units, inputs + 1], its biases in the last column.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from paceline.tables.types import Floats


def dense(inputs: Tensor, layer: Tensor) -> Tensor:
    """Return what a layer makes of inputs [n, inputs]: [n, units]."""
    return functional.linear(inputs, layer[:, :-1], layer[:, -1])


def perceptron(inputs: Tensor, layers: Sequence[Tensor]) -> Tensor:
    """Return the output of hidden layers, each followed by max(0, ·)."""
    for layer in layers:
        inputs = dense(inputs, layer).relu()
    return inputs


def cross_network(inputs: Tensor, layers: Sequence[Tensor]) -> Tensor:
    """Return x_L, with x_{l+1} = x_0 ⊙ (W_l x_l + b_l) + x_l (Wang et al., DCN V2, WWW 2021, equation 1)."""
    crossed = inputs
    for layer in layers:
        crossed = inputs * dense(crossed, layer) + crossed
    return crossed


def deep_output(inputs: Tensor, layers: Sequence[Tensor]) -> Tensor:
    """Return [n, 1]: the last layer's of the hidden ones'."""
    return dense(perceptron(inputs, layers[:-1]), layers[-1])


def deep_and_cross_output(inputs: Tensor, layers: Sequence[Tensor], num_cross: int) -> Tensor:
    """Return [n, 1]: the last layer's of the first `num_cross` layers', which cross, beside the hidden ones'."""
    crossed = cross_network(inputs, layers[:num_cross])
    return dense(torch.cat([crossed, perceptron(inputs, layers[num_cross:-1])], 1), layers[-1])


Network = Callable[[Tensor, Sequence[Tensor]], Tensor]


class NetworkPass:
    """One pass of a minibatch through a network, and the way back.

    `margins` float32 [n] are what the network says of `inputs`, float32 [n, inputs].
    """

    def __init__(self, network: Network, inputs: Floats, layers: Sequence[Floats]) -> None:
        self._leaves = [torch.from_numpy(each).requires_grad_() for each in (inputs, *layers)]
        with _one_thread():
            self._output = network(self._leaves[0], self._leaves[1:]).squeeze(1)
        self.margins: Floats = self._output.detach().numpy()

    def gradients(self, residuals: Floats) -> list[Floats]:
        """Return the gradients by inputs and by each layer, given the loss's derivatives by margin (float32 [n])."""
        with _one_thread():
            found = torch.autograd.grad(self._output, self._leaves, torch.from_numpy(residuals))
        return [np.ascontiguousarray(each.numpy()) for each in found]


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Have PyTorch compute in this thread alone: on busy cores, waiting for others took 100 times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
