"""Predictions over HTTP: ``paceline serve`` (the extra ``paceline[serve]``)."""
