"""Use saved models in this process: predict arrays, frames and files."""

from paceline.inference.model import LoadedModel, load

__all__ = ["LoadedModel", "load"]
