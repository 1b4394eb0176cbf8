"""Divide a dataset among ranks whose number may change within an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler
from typing_extensions import override

from paceline.horovod.context import rank, size


class ElasticSampler(Sampler[int]):
    """Yields this rank's part of the samples of an epoch that are not processed yet.

    The training loop must call :meth:`record_batch` after each batch, and commit the sampler in a
    :class:`~paceline.horovod.elastic.TorchState`. Each sample of an epoch is then processed once, even if the ranks
    change. All ranks have the same number of samples: if the number of remaining samples is not a multiple of the
    number of ranks, up to ``size() - 1`` samples are processed twice.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """With `shuffle`, each epoch has a different random order. `seed` must be equal on all ranks."""
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0
        """The number of processed samples of this epoch, on all ranks."""
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch without processed samples. Call this method at the end of the previous epoch."""
        self.load_state_dict({"epoch": epoch, "processed_num": 0})

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch of `batch_size` samples on each rank as processed. `batch_idx` has no effect."""
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: Sized) -> None:
        """Count the samples `indices` of this rank, and the same number of samples of each other rank, as processed."""
        self.record_batch(0, len(indices))

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of processed samples."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue in the epoch of a state, after its processed samples."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the samples that are not processed yet among the current ranks."""
        self.num_replicas, self.rank = size(), rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            indices = torch.randperm(len(indices), generator=generator).tolist()
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    @override
    def __iter__(self) -> Iterator[int]:
        padded = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return itertools.islice(padded, self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        """Return the number of samples of this rank, which is equal on all ranks."""
        return self.num_samples
