"""Tagged send and receive between the ranks of one group."""
