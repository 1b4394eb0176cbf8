"""Models with a network over the factors of each column. The layers are rows of tables, like other parameters."""
