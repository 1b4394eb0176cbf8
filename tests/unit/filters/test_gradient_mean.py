"""Gradients with filters: the mean of all ranks, without a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paceline.errors import UsageError
from paceline.filters import Quantize, TopK, parse_filters
from paceline.filters.gradients import Averaging, GradientMean, gradient_filters

RATES = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "quantize:8": 1 / 100, "quantize:4": 1 / 6}


def drive(averagings: Sequence[Averaging]) -> tuple[list[np.ndarray[Any, Any]], int]:
    """Simulate a network of ranks: return the means of all ranks, and the number of bytes that the first rank sends."""
    received: list[Any] = [None] * len(averagings)
    num_bytes = 0
    while True:
        exchanges, ended = [], []
        for averaging, came in zip(averagings, received, strict=True):
            try:
                exchanges.append(averaging.send(came))
            except StopIteration as stop:
                ended.append(stop.value)
        if ended:
            assert not exchanges
            return ended, num_bytes
        data = [exchange.data for exchange in exchanges]
        assert len({(exchange.is_for_all, exchange.data.shape) for exchange in exchanges}) == 1
        size = len(data)
        if exchanges[0].is_for_all:
            received = [np.stack(data) for _ in data]
            num_bytes += data[0].nbytes * (size - 1)
        else:
            received = [np.stack([array[rank] for array in data]) for rank in range(size)]
            num_bytes += data[0].nbytes * (size - 1) // size


def means_of(text: str, size: int, count: int) -> list[GradientMean]:
    chain = gradient_filters(text)
    return [GradientMean(chain, rank, size, np.zeros(count, np.float32)) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, pytest.param(5, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("count", [1, 300, 5000])
@pytest.mark.parametrize(
    "text",
    [
        *(*RATES, "quantize:2", "quantize:1", "top-k:0.1", "random-k:0.3", "top-k:0.1,quantize:8"),
        *("random-k:0.3,float16", "random-k:0.3,quantize:4", "random-k:0.01,quantize:1"),
    ],
)
def test_all_ranks_compute_equal_means_and_lose_no_part(text: str, count: int, size: int) -> None:
    random = np.random.default_rng(3)
    means = means_of(text, size, count)
    total, sent = np.zeros(count), np.zeros(count)
    for _ in range(6):
        grads = random.standard_normal((size, count)).astype(np.float32)
        found, _ = drive([mean.average(grad) for mean, grad in zip(means, grads, strict=True)])
        for other in found[1:]:
            np.testing.assert_array_equal(found[0], other)
        if text in RATES:
            assert np.abs(found[0] - grads.mean(axis=0)).max() < 4 * RATES[text] * np.abs(grads).max()
        total += grads.astype(np.float64).mean(axis=0)
        sent += found[0]
    # Each rank stores the removed part of its gradients, and one rank stores the removed part of the mean.
    held = np.mean([mean.residual for mean in means], axis=0)
    if not text.startswith("top-k"):
        held += np.concatenate([mean.mean_residual for mean in means])
    np.testing.assert_allclose(sent + held, total, atol=2e-4)
    for mean in means:
        mean.fold_into_residual()
    np.testing.assert_allclose(sent + np.mean([mean.residual for mean in means], axis=0), total, atol=2e-4)


def test_filters_reduce_the_sent_bytes() -> None:
    count, size = 1 << 16, 4
    plain = 2 * 4 * count * (size - 1) // size
    expected = {"float16": 1.99, "quantize:8": 3.9, "quantize:4": 7.5, "quantize:1": 25, "random-k:0.1": 9}
    for text, ratio in {**expected, "top-k:0.01,quantize:8": 25}.items():
        means = means_of(text, size, count)
        grads = np.random.default_rng(1).standard_normal(count).astype(np.float32)
        _, num_bytes = drive([mean.average(grads) for mean in means])
        assert plain / num_bytes > ratio, text


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("float16", marks=pytest.mark.thorough),
        pytest.param("quantize:8", marks=pytest.mark.thorough),
        pytest.param("quantize:2", marks=pytest.mark.thorough),
        "quantize:1",
        "top-k:0.05",
        pytest.param("random-k:0.2", marks=pytest.mark.thorough),
        "random-k:0.2,quantize:2",
    ],
)
def test_descent_reaches_the_unfiltered_optimum(text: str) -> None:
    """Least squares on three ranks: the part of a gradient that a filter removes is sent later."""
    random, size, dim = np.random.default_rng(7), 3, 400
    inputs = random.standard_normal((size, 600, dim)).astype(np.float32) / np.float32(np.sqrt(dim))
    targets = inputs @ random.standard_normal(dim).astype(np.float32)

    def loss_after(means: list[GradientMean] | None) -> float:
        weights = np.zeros(dim, np.float32)
        for _ in range(400):
            errors = inputs @ weights - targets
            grads = [inputs[rank].T @ errors[rank] / np.float32(600) for rank in range(size)]
            mean = np.mean(grads, axis=0)
            if means is not None:
                mean = drive([averaging.average(grad) for averaging, grad in zip(means, grads, strict=True)])[0][0]
            weights -= np.float32(60.0) * mean
        return float(np.square(inputs @ weights - targets).mean())

    at_first = float(np.square(targets).mean())
    assert loss_after(None) < 1e-6 * at_first
    assert loss_after(means_of(text, size, dim)) < 0.002 * at_first


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(
    "text",
    [
        *(*RATES, "quantize:2", "quantize:1", "top-k:0.05", "top-k:0.05,float16", "top-k:0.05,quantize:1"),
        *("random-k:0.1", "random-k:0.1,float16", "random-k:0.001,bfloat16"),
    ],
)
def test_all_ranks_see_non_finite_values_and_no_rank_stores_the_values(text: str, value: float) -> None:
    """A non-finite value means that the loss scale is too large, so each rank must receive it with any filter."""
    means = means_of(text, 2, 600)
    grads = np.ones(600, np.float32)
    broken = grads.copy()
    broken[3] = value
    for _ in range(5):
        found, _ = drive([means[0].average(broken), means[1].average(grads)])
        assert not np.isfinite(found[0]).all()
        np.testing.assert_array_equal(found[0], found[1])
    for mean in means:
        assert np.isfinite(mean.residual).all()
        assert np.isfinite(mean.mean_residual).all()
    found, _ = drive([mean.average(grads) for mean in means])
    assert np.isfinite(found[0]).all()


def test_a_single_rank_changes_no_values() -> None:
    grads = np.random.default_rng(1).standard_normal(100).astype(np.float32)
    found, num_bytes = drive([means_of("quantize:1", 1, 100)[0].average(grads)])
    assert num_bytes == 0
    np.testing.assert_array_equal(found[0], grads)


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        (
            "key-caching,quantize:8",
            "key-caching:64 is not for gradients .*, because they have no keys",
        ),
        (
            "quantize:8,compress",
            "compress:1 is not for .*, because all ranks .* numbers of bytes. Use float16",
        ),
        ("significant:1", "significant:1 is not for gradients that all ranks average. Use top-k or random-k"),
        ("top-k:0.1,random-k:0.5", "both choose values"),
        ("", "filters is empty"),
        ("zip", "filter 'zip' is unknown"),
    ],
)
def test_filters_unsuitable_for_gradients(filters: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        gradient_filters(filters)
    assert str(gradient_filters([TopK(0.5), Quantize(4)])) == str(parse_filters("top-k:0.5,quantize:4"))
