"""Authentication: the handshake with proofs of the token, tags on frames, and limits for unauthenticated peers."""
