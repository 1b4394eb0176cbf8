"""Each option of ``paceline train`` is one that both solvers take, or one of them refuses."""

from __future__ import annotations

import inspect

from paceline.cli.solver import OF_BLOCKS, OF_MINIBATCHES
from paceline.cli.train import train

_OF_BOTH = """
data evaluation model format label positive categorical numeric numeric_scale epochs servers workers solver
consistency replicas min_replicas non_finite l1 l2 weight class_weight keep_negatives filters save feature_names cache
snapshot_dir snapshots auto_resume strict json quiet heartbeat_timeout scheduler token_file tls_cert tls_key tls_ca
filter_module dim factor_lr factor_l2 factor_min_count hidden cross_layers tower_lr classes context memory_limit
spill_dir
"""


def test_each_option_is_thought_of() -> None:
    """A new option that minibatches alone know is to be named among those that proximal blocks refuse."""
    options = set(inspect.signature(train).parameters)
    assert options == set(_OF_BOTH.split()) | set(OF_BLOCKS) | set(OF_MINIBATCHES)
    assert not set(OF_BLOCKS) & set(OF_MINIBATCHES)
