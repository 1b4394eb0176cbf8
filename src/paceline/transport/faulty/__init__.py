"""Transport with planned faults, for tests."""
