"""Optional TLS for connections: contexts, channels and streams."""
