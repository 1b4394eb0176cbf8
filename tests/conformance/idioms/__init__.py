"""Idioms of training scripts between ``backward()`` and ``step()``, and between steps.

An *idiom* trains a small model and returns tensors, usually the parameters at the end. :func:`run_all` runs all idioms
under every strategy. The tensors equal the tensors of one device to 1e-5, or the strategy raises an error of one
sentence.
"""

# This is the order of the table in the docs.
from tests.conformance.idioms import gradients, backward, parameters, model_and_optimizer, several_models  # noqa: F401, I001
from tests.conformance.idioms.trial import IDIOMS, OPTIONS, Trial, idiom

__all__ = ["IDIOMS", "OPTIONS", "Trial", "idiom"]
