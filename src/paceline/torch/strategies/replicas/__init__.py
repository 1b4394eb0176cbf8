"""Strategies whose replicas are threads of one process: `Mirrored`, `CentralStorage`."""
