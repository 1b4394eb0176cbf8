"""Serve predictions over HTTP: ``paceline serve`` (the extra ``paceline[serve]``)."""
