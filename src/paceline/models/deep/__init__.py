"""Models with a network over the factors of each column, whose layers are rows of tables as all parameters are."""
