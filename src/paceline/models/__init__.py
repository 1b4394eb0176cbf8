"""Models: sparse logistic regression."""
