"""Choose the settings of a training by trials on a sample of its data."""

from paceline.training.tuning.choices import (
    FASTER_RATES,
    L1,
    LINEAR_RATES,
    RATES,
    SPARSE,
    WIDE_L1,
    WIDE_RATES,
    has_steady_loss,
    is_sorted_by_label,
    passes_for_all,
    suggested_alpha,
    suggested_batch_size,
    suggested_l2,
    suits_mixing,
    tune,
    wants_sparsity,
)
from paceline.training.tuning.scale_trial import Scaling, best_scaling, is_worse_for_factors, scaled_sample
from paceline.training.tuning.search import FactorSearch, TunedModel, tune_linear
from paceline.training.tuning.trial import TriedRule

__all__ = [
    "FASTER_RATES",
    "L1",
    "LINEAR_RATES",
    "RATES",
    "SPARSE",
    "WIDE_L1",
    "WIDE_RATES",
    "FactorSearch",
    "Scaling",
    "TriedRule",
    "TunedModel",
    "best_scaling",
    "is_sorted_by_label",
    "has_steady_loss",
    "is_worse_for_factors",
    "passes_for_all",
    "scaled_sample",
    "suggested_alpha",
    "suggested_batch_size",
    "suggested_l2",
    "suits_mixing",
    "tune",
    "tune_linear",
    "wants_sparsity",
]
