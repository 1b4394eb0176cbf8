"""Elastic training, whose ranks may die and join: ``hvd.elastic``. The guide has an example."""

from paceline.horovod.elastic.running import run
from paceline.horovod.elastic.sampler import ElasticSampler
from paceline.horovod.elastic.state import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
