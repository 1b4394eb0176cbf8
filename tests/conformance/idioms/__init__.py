"""What scripts do between ``backward()`` and ``step()``, and between steps: each under a strategy, beside one device.

An *idiom* trains a small model and returns tensors, most often the parameters at the end. :func:`run_all` carries all
of them out under every strategy: what they return is that of one device to 1e-5, or the strategy refuses, with one
sentence.
"""

# In the order of the table in the docs.
from tests.conformance.idioms import gradients, backward, parameters, model_and_optimizer, several_models  # noqa: F401, I001
from tests.conformance.idioms.trial import IDIOMS, OPTIONS, Trial, idiom

__all__ = ["IDIOMS", "OPTIONS", "Trial", "idiom"]
