"""A planted defect: one place of the product's source, and what a tired programmer might write there instead."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Simulation(Enum):
    """Which simulated clusters can show a defect."""

    PROTOCOL = "protocol"
    """Those of the pure rules."""
    PRODUCT = "product"
    """Those of the product's own servers, schedulers and clients."""
    NONE = "none"


@dataclass(frozen=True)
class Defect:
    """A mistake, where it is made, and who is asked to find it."""

    name: str
    what: str
    """What goes wrong, in the words of the report."""
    module: str
    """The file, below ``src/paceline``."""
    right: str
    """The text that stands there; it occurs once."""
    wrong: str
    unit: tuple[str, ...]
    """The unit tests that are asked; the fewer, the sooner there is an answer."""
    integration: tuple[str, ...] = ()
    """The tests with sockets that are asked if nobody else has found it."""
    simulation: Simulation = Simulation.PROTOCOL

    @property
    def alters_kernels(self) -> bool:
        """Whether compiled code changes: its tests run without the compiler, which would take longer than they do."""
        return self.module.startswith(("kernels/", "tables/rules/"))

    def apply(self, text: str) -> str:
        """Return the module's text with the defect. Raises ValueError unless the place is there, once."""
        if text.count(self.right) != 1:
            raise ValueError(
                f"{self.name}: {self.module} has {text.count(self.right)} places that read {self.right!r}: expected "
                "one; mend the defect in tests/mutants/"
            )
        return text.replace(self.right, self.wrong)
