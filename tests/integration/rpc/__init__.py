"""Calls, references and gradients over real sockets, in one process."""
