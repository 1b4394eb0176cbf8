"""Saved models as objects: loaded into this process, they predict arrays, frames and files."""

from paceline.inference.model import LoadedModel, load

__all__ = ["LoadedModel", "load"]
