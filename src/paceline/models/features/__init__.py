"""Features of models: crosses of columns, and counts to select frequent features."""
