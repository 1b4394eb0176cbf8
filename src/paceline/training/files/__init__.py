"""The files of a training: columns, labels, scales and malformed lines."""
