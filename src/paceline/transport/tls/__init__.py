"""Optional TLS: contexts, channels and streams."""
