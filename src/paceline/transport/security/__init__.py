"""Who the peer is: the handshake, the proof of the token, sealed frames, strangers."""
