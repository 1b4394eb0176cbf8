"""How the numbers of columns are brought to scales, or cut into bins, and how that is chosen."""
