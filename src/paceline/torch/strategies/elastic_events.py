"""The events of an elastic training for which a strategy may have work to do."""

from __future__ import annotations


class ElasticEvents:
    """The methods have no effect. Strategies with servers override them."""

    @property
    def iterations(self) -> list[int]:
        """The number of the current iteration on servers, and each optimizer's number of steps on servers."""
        return []

    def join_iterations(self, iterations: list[int]) -> None:
        """On a new rank that has received the state, take part in the servers' iterations."""

    def end_transfer(self) -> None:
        """Record that new ranks have received the state, on every rank."""

    def begin_batch(self, share: float) -> None:
        """Record that the training loop receives a batch.

        `share` is this rank's number of samples divided by the mean of the ranks' numbers.
        """
