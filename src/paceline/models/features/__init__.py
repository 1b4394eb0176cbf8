"""Features of models: crosses of columns, and counts for selecting frequent features."""
