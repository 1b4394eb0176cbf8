"""Planted defects: plausible mistakes in the product, each of which the tests have to find (``make mutants``)."""
