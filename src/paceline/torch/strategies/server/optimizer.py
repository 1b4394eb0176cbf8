"""Define the optimizer that the training loop uses if servers update the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import override

from paceline.errors import UsageError
from paceline.torch.strategies.server.dense_parameters import DenseParameters


class ServerOptimizer(Optimizer):
    """Replaces the user's optimizer. It has the same groups, hooks and schedulers, but its state is on the servers."""

    # GradScaler must divide the gradients itself. If this were True, it would leave the division to the optimizer.
    _step_supports_amp_scaling = False

    # Do not call Optimizer.__init__: all other attributes come from the user's optimizer.

    def __init__(
        self,
        inner: Optimizer,
        step: Callable[[], None],
        dense: DenseParameters | None,
    ) -> None:
        """`step` sends the gradients and ends the iteration. `dense` is None without dense parameters."""
        self.inner = inner
        self._step = step
        self._dense = dense

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # copy.copy() reads `inner` before it is set
            raise AttributeError(name)
        return getattr(self.inner, name)

    @Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        self.inner._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers check it
        return loss

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the hyperparameters, and the state from the servers, in torch's form. One rank may call this alone."""
        state = {} if self._dense is None else self._dense.read_state(self.inner)
        return {**self.inner.state_dict(), "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Write a state of torch's optimizer to the servers. Every rank must call this method."""
        self.inner.load_state_dict({**state_dict, "state": {}})
        if self._dense is not None:
            self._dense.write_state(self.inner, state_dict["state"])

    @property
    def state(self) -> Any:
        """Raise UsageError, because the state is on the servers. A write to a local state would have no effect."""
        raise UsageError(
            "optimizer.state is on the servers: read it by optimizer.state_dict(), and set it by load_state_dict()"
        )

    @state.setter
    def state(self, value: Any) -> None:
        self.state  # noqa: B018

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UsageError, because only prepare() stores parameters on the servers."""
        raise UsageError("add_param_group() after prepare(): pass all parameters to the optimizer before prepare()")

    def __repr__(self) -> str:
        return f"ServerOptimizer({self.inner!r})"
