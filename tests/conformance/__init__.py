"""The conformance suite of strategies: idioms of scripts under each strategy, compared with one device."""

from tests.conformance.conformance import STRATEGIES, as_table, run_all
from tests.conformance.idioms import IDIOMS, Trial, idiom

__all__ = ["IDIOMS", "STRATEGIES", "Trial", "as_table", "idiom", "run_all"]
