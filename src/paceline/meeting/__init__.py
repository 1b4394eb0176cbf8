"""How the ranks of a program find, authenticate and connect to one another, for collectives, messages and `rpc`."""
