"""The sampler of elastic training."""

from paceline.horovod.elastic import ElasticSampler

__all__ = ["ElasticSampler"]
