"""Communication between processes: frames, servers, client channels, authentication."""

from paceline.decoded_types import register_type
from paceline.transport.addresses import Address, Endpoint, host_identity
from paceline.transport.base import Channel, Frame, Handler, Listener, Peer, Statistics, Transport
from paceline.transport.decoding import UNREADABLE, error_meta, error_of, read_meta, reader
from paceline.transport.frames import (
    FIRST_APPLICATION_KIND,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    PADS,
    PROTOCOL_VERSION,
    Buffer,
    FrameKind,
    Header,
    Limits,
    WritableBuffer,
    frame_parts,
    pack_header,
    padded,
    unpack_header,
)
from paceline.transport.security.authentication import Hello, make_token, read_token
from paceline.transport.sockets import SocketTransport
from paceline.transport.spinning import new_event_loop
from paceline.transport.tls.contexts import TLS

__all__ = [
    "FIRST_APPLICATION_KIND",
    "HEADER",
    "HEADER_BYTES",
    "MAGIC",
    "PADS",
    "PROTOCOL_VERSION",
    "TLS",
    "UNREADABLE",
    "Address",
    "Buffer",
    "Channel",
    "Endpoint",
    "Frame",
    "FrameKind",
    "Handler",
    "Header",
    "Hello",
    "Limits",
    "Listener",
    "Peer",
    "SocketTransport",
    "Statistics",
    "Transport",
    "WritableBuffer",
    "error_meta",
    "error_of",
    "frame_parts",
    "host_identity",
    "make_token",
    "new_event_loop",
    "pack_header",
    "padded",
    "read_meta",
    "read_token",
    "reader",
    "register_type",
    "unpack_header",
]
