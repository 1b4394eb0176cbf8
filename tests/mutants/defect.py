"""A planted defect: a plausible mistake at one place of the product's source."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Simulation(Enum):
    """The kind of simulated clusters that can show a defect."""

    PROTOCOL = "protocol"
    """Clusters of the pure rules."""
    PRODUCT = "product"
    """Clusters of the product's own servers, schedulers and clients."""
    NONE = "none"


@dataclass(frozen=True)
class Defect:
    """A mistake, its place, and the tests that should find it."""

    name: str
    effect: str
    """The effect, for the report."""
    module: str
    """The file, relative to ``src/paceline``."""
    right: str
    """The correct text. It occurs exactly once in the file."""
    wrong: str
    unit: tuple[str, ...]
    """The unit tests to run; a short list saves time."""
    integration: tuple[str, ...] = ()
    """The tests with sockets, run if no other test finds the defect."""
    simulation: Simulation = Simulation.PROTOCOL

    @property
    def alters_kernels(self) -> bool:
        """Whether the defect changes compiled code. Then its tests run without the compiler, to save time."""
        return self.module.startswith(("kernels/", "tables/rules/"))

    def apply(self, text: str) -> str:
        """Return the module's text with the defect. Raises ValueError unless the correct text occurs once."""
        if text.count(self.right) != 1:
            raise ValueError(
                f"{self.name}: {self.module} has {text.count(self.right)} places that read {self.right!r}: expected "
                "one. Correct the defect in tests/mutants/"
            )
        return text.replace(self.right, self.wrong)
