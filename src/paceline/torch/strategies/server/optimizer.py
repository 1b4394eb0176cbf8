"""The optimizer that a training loop has where the servers do the updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import override

from paceline.errors import UsageError
from paceline.torch.strategies.server.dense_parameters import DenseParameters


class ServerOptimizer(Optimizer):
    """Stands for the user's optimizer: has its parameter groups, hooks and schedulers, and another step.

    The state (momentum and the like) lies on the servers: ``state_dict()`` reads it there.
    """

    _step_supports_amp_scaling = False  # GradScaler divides the gradients itself, whatever a fused optimizer could do

    # Optimizer.__init__ is not called: what is not defined here, attributes included, is the user's optimizer's.

    def __init__(
        self,
        inner: Optimizer,
        step: Callable[[], None],
        dense: DenseParameters | None,
    ) -> None:
        """`step` ends the iteration; without `dense` parameters there is no state."""
        self.inner = inner
        self._step = step
        self._dense = dense

    def __getattr__(self, name: str) -> Any:
        """Return the user's optimizer's."""
        if name == "inner":  # while it is being copied
            raise AttributeError(name)
        return getattr(self.inner, name)

    @Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Send what gradients are left, end the iteration, and ask for the new values."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        self.inner._opt_called = True  # type: ignore[attr-defined]  # what torch's schedulers look for
        return loss

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return hyperparameters and state as torch does; one rank may call it by itself."""
        state = {} if self._dense is None else self._dense.read_state(self.inner)
        return {**self.inner.state_dict(), "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state that torch's optimizer has saved, to the servers; every rank calls it."""
        self.inner.load_state_dict({**state_dict, "state": {}})
        if self._dense is not None:
            self._dense.write_state(self.inner, state_dict["state"])

    @property
    def state(self) -> Any:
        """Raise UsageError: it is on the servers, and what is written here would not count."""
        raise UsageError(
            "optimizer.state is on the servers: read it by optimizer.state_dict(), and set it by load_state_dict()"
        )

    @state.setter
    def state(self, value: Any) -> None:
        self.state  # noqa: B018

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UsageError: what lies on the servers is settled by prepare()."""
        raise UsageError("add_param_group() after prepare(): give the optimizer all of its parameters before")

    def __repr__(self) -> str:
        return f"ServerOptimizer({self.inner!r})"
