"""The parts of Horovod that all frameworks share."""
