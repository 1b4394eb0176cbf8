"""Planted defects: plausible mistakes in the product. The tests must find each defect (``make mutants``)."""

from tests.mutants.defect import Defect, Simulation
from tests.mutants.of_product import OF_PRODUCT
from tests.mutants.of_protocol import OF_PROTOCOL

DEFECTS = (*OF_PROTOCOL, *OF_PRODUCT)

__all__ = ["DEFECTS", "Defect", "Simulation"]
