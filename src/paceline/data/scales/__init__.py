"""Choose and apply scales and bins for the numbers of columns."""
