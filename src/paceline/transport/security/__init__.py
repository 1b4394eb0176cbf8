"""Authentication of peers: handshake, token proofs, sealed frames, unauthenticated connections."""
