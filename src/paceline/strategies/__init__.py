"""Declare the strategies: names, requirements and options. The launcher, which does not import torch, uses this
package. The package ``paceline.torch`` implements the strategies.
"""

from paceline.strategies.elastic import (
    ELASTIC_ADVICE,
    NO_GLOBAL_BATCH,
    ElasticFlags,
    ElasticOptions,
    choose_elastic,
    is_elastic,
)
from paceline.strategies.pipeline import SCHEDULES, PipelineFlags, PipelineOptions, choose_pipeline
from paceline.strategies.registry import (
    MOST_PROCESSES,
    NEUTRAL_SETTINGS,
    STRATEGIES,
    StrategyChoice,
    StrategyFlags,
    check_strategy,
    choose_strategy,
    default_strategy,
    needs_servers,
)
from paceline.strategies.sharding import ShardingFlags, ShardingOptions, choose_sharding
from paceline.strategies.spec import StrategyOptions, StrategySpec

__all__ = [
    "ELASTIC_ADVICE",
    "ElasticFlags",
    "ElasticOptions",
    "MOST_PROCESSES",
    "NEUTRAL_SETTINGS",
    "NO_GLOBAL_BATCH",
    "PipelineFlags",
    "PipelineOptions",
    "SCHEDULES",
    "STRATEGIES",
    "ShardingFlags",
    "ShardingOptions",
    "StrategyChoice",
    "StrategyFlags",
    "StrategyOptions",
    "StrategySpec",
    "check_strategy",
    "choose_elastic",
    "choose_pipeline",
    "choose_sharding",
    "choose_strategy",
    "default_strategy",
    "is_elastic",
    "needs_servers",
]
