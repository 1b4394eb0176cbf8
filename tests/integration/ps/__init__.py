"""Parameter servers over real sockets, in one process."""
