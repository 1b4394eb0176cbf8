"""What is made of features before a model sees them, and which of them it sees."""
