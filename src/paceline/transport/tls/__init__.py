"""TLS by flag: contexts, channels and streams."""
