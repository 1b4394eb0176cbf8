"""The timeline of a run: the operations of all its processes during some steps of the training loop."""
