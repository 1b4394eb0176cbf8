"""Rendezvous, authentication and connections of a program's ranks, for collectives, messages and `rpc`."""
