"""Connect the ranks of a program: stores, nodes, credentials."""
