"""How the ranks of a program find one another: stores, nodes, credentials."""
