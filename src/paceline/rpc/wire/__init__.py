"""The wire format of rpc: messages, values and framed sockets.

The modules for special values (for example tensors) are imported when the first special value is sent or received.
"""

from paceline.rpc.wire.codec import FindPack, set_loaders


def _load_values() -> FindPack:
    from paceline.rpc.wire.kinds import find_pack

    return find_pack


def _load_tensors() -> None:
    import paceline.rpc.wire.tensors  # noqa: F401  (registers the kinds of torch)


set_loaders(_load_values, _load_tensors)
