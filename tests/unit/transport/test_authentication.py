from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from tests.memory_transport import MemoryTransport

from paceline.environment import Environment, environment
from paceline.errors import AddressError, AuthenticationError, ProtocolError, UsageError, VersionError
from paceline.meeting.node import Node
from paceline.transport import TLS, Address, Hello, SocketTransport, make_token, read_token
from paceline.transport.client_handshake import ClientHandshake
from paceline.transport.security.authentication import Challenge, ConnectionIdentity, Proof, decode, join_fields, prove
from paceline.transport.security.server_handshake import ServerHandshake

TOKEN = "the token of this cluster"
WORKER = Hello(role="worker", rank=3, extra={"slots": 4})
SERVER = Hello(role="server", rank=1, cluster="one")
ADDRESS = Address("tcp", "10.0.0.7", 7000)


def decoded(meta: bytes) -> Proof:
    return decode(meta, Proof)


class Handshake:
    """Both halves of a handshake. A test may change the messages between the halves."""

    def __init__(self, *, client: Hello = WORKER, server: Hello = SERVER, listener: str = "", token: str = TOKEN):
        self.client = ClientHandshake(ADDRESS, token, client, listener=listener)
        self.server = ServerHandshake(TOKEN, server, "the listener")

    def start_proof(self, binding: bytes = b"") -> Proof:
        return decoded(self.client.answer(self.server.challenge(), binding))

    def answer(self, proof: Proof, binding: bytes = b"") -> Proof:
        self.server.receive_hello(msgspec.msgpack.encode(proof))
        return decoded(self.server.welcome(binding))

    def finish(self, welcome: Proof) -> Hello:
        return self.client.finish(msgspec.msgpack.encode(welcome))


def test_both_ends_receive_the_identity_of_the_peer() -> None:
    both = Handshake()
    met = both.finish(both.answer(both.start_proof()))
    assert (met.role, met.rank, met.protocol) == ("server", 1, 2)
    hello = both.server.identify()
    assert (hello.role, hello.rank, hello.extra) == ("worker", 3, {"slots": 4})
    assert hello.paceline


def test_no_field_of_the_client_can_be_altered() -> None:
    replace = msgspec.structs.replace
    proof = Handshake().start_proof()
    reflected = prove(TOKEN, "server", proof.nonce, b"s" * 32, proof.hello, proof.view)
    for altered in (
        proof,  # a replayed proof for another server's nonce
        Handshake(token="the token of another").start_proof(),
        replace(proof, hello=proof.hello.replace(b"worker", b"wonder")),
        replace(proof, view=proof.view.replace(b"10.0.0.7", b"10.0.0.8")),
        replace(proof, nonce=b"n" * 32),
        replace(proof, nonce=b""),
        replace(proof, proof=b""),
        replace(proof, proof=reflected),
    ):
        with pytest.raises(AuthenticationError):
            Handshake().server.receive_hello(msgspec.msgpack.encode(altered))


def test_no_field_of_the_server_can_be_altered() -> None:
    replace = msgspec.structs.replace
    for alter in (
        lambda welcome: replace(welcome, hello=welcome.hello.replace(b"server", b"sorcer")),
        lambda welcome: replace(welcome, view=msgspec.msgpack.encode(ConnectionIdentity(listener="another"))),
        lambda welcome: replace(welcome, proof=bytes(32)),
    ):
        both = Handshake()
        welcome = both.answer(both.start_proof())
        with pytest.raises(AuthenticationError, match="could not prove"):
            both.finish(alter(welcome))


def test_a_client_accepts_only_nonces_of_32_bytes() -> None:
    """A longer nonce could contain the head of another Hello after the real server's nonce."""
    for length in (0, 31, 33, 96):
        meta = msgspec.msgpack.encode(Challenge(bytes(length)))
        with pytest.raises(ProtocolError, match=f"nonce of {length} bytes, expected 32"):
            ClientHandshake(ADDRESS, TOKEN, WORKER).answer(meta, b"")


def test_field_boundaries_are_authenticated() -> None:
    assert join_fields(b"ab", b"c") != join_fields(b"a", b"bc") != join_fields(b"abc")


def test_the_proof_of_the_protocol_version_is_unchanged() -> None:
    """The protocol paceline/2 fixes these bytes, so that different releases can connect."""
    proof = prove(TOKEN, "client", b"c" * 32, b"s" * 32, b"hello", b"view")
    assert proof.hex() == "b05da9145fed06b50f9e1f7d81160216917532f410b91741cc440d59316cfce9"


@pytest.mark.parametrize(
    ("client", "listener", "reason"),
    [
        (WORKER, "another listener", "the previous one has ended"),
        (Hello(role="worker", to="scheduler"), "", "a server listens there, but a scheduler was expected"),
        (Hello(role="worker", cluster="two"), "", "belongs to another cluster"),
    ],
)
def test_a_connection_for_another_peer_is_rejected_by_both_ends(client: Hello, listener: str, reason: str) -> None:
    both = Handshake(client=client, listener=listener)
    welcome = both.answer(both.start_proof())
    with pytest.raises(AddressError, match=reason):
        both.server.identify()
    with pytest.raises(AddressError, match=reason):
        both.finish(welcome)


def test_the_expected_peer_is_accepted() -> None:
    for client, server in (
        (Hello(role="worker", to="server", cluster="one"), SERVER),
        (WORKER, SERVER),  # the client does not know the cluster yet
        (Hello(role="worker", cluster="one"), Hello(role="server")),
    ):
        both = Handshake(client=client, server=server, listener="the listener")
        both.finish(both.answer(both.start_proof()))
        both.server.identify()


@pytest.mark.parametrize("protocol", [2, 8])
def test_versions_are_named(protocol: int) -> None:
    named = rf"version {protocol} \(paceline 9\.9\), but this process has version 2 \(paceline 0"
    stranger = Hello(role="worker", protocol=protocol, paceline="9.9")
    both = Handshake(client=stranger)
    both.answer(both.start_proof())
    with pytest.raises(VersionError, match=named):
        both.server.identify()
    both = Handshake(server=stranger)
    with pytest.raises(VersionError, match=named):
        both.finish(both.answer(both.start_proof()))


def test_frames_are_sealed_unless_both_ends_see_the_same_connection() -> None:
    for client, server, is_sealed in (
        (b"one", b"one", False),
        (b"one", b"two", True),
        (b"", b"", True),
        (b"one", b"", True),
        (b"", b"one", True),
    ):
        both = Handshake()
        both.finish(both.answer(both.start_proof(client), server))
        assert (both.client.seals is not None) == (both.server.seals is not None) == is_sealed
        if both.client.seals is not None and both.server.seals is not None:
            tags = both.client.seals.sending.tag((b"frame",)), both.client.seals.sending.tag((b"frame",))
            assert tags[0] != tags[1]
            for tag in tags:
                both.server.seals.receiving.update(b"frame")
                assert both.server.seals.receiving.matches(tag)
            assert both.server.seals.sending.tag((b"frame",)) not in tags


def test_a_garbage_handshake_is_rejected() -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode(b"\xc1", Proof)


def test_tokens_are_created_and_read(tmp_path: Path) -> None:
    token = make_token()
    assert len(token) == 43
    assert token != make_token()
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(f"  {token}\n")
    assert read_token(file) == token
    with pytest.raises(UsageError, match=r"cannot read the cluster's token from .*missing"):
        read_token(tmp_path / "missing")


@pytest.mark.parametrize("token", ["", "guess", "fifteen letters"])
def test_a_short_token_is_rejected(tmp_path: Path, token: str) -> None:
    message = f"has {len(token)} characters, but at least 16 are needed against guessing. Create one: python"
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(token + "\n")
    with pytest.raises(UsageError, match=f"the token in {file} {message}"):
        read_token(file)
    for use in (SocketTransport, MemoryTransport, Node):
        with pytest.raises(UsageError, match=f"the token {message}"):
            use(token)


@pytest.mark.skipif(os.name != "posix", reason="file modes exist only on POSIX systems")
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o602])
def test_a_token_readable_by_other_users_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "the token"
    file.write_text(make_token())
    file.chmod(mode)
    with pytest.raises(UsageError, match=rf"open to other users \(mode 0{mode:o}\).*Run: chmod 600 '{file}'"):
        read_token(file)
    file.chmod(0o400)
    read_token(file)


def test_a_token_may_come_through_a_pipe() -> None:
    reading, writing = os.pipe()
    token = make_token()
    os.write(writing, token.encode())
    os.close(writing)
    try:
        assert read_token(f"/dev/fd/{reading}") == token
    finally:
        os.close(reading)


def test_tls_files_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a certificate"):
        TLS().server_context()
    for tls in (TLS(cert=tmp_path / "none.pem"), TLS(ca=tmp_path / "none.pem")):
        with pytest.raises(UsageError, match=r"none\.pem"):
            tls.client_context()
    (tmp_path / "empty.pem").touch()
    with pytest.raises(UsageError, match=r"empty\.pem"):
        TLS(cert=tmp_path / "empty.pem").server_context()


def test_the_environment_is_read_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment({}) == Environment()
    found = environment(
        {
            "PACELINE_ROLE": "server",
            "PACELINE_SCHEDULER": "tcp://a:1",
            "PACELINE_TOKEN": "secret",
        }
    )
    assert found == Environment(role="server", scheduler="tcp://a:1", token="secret")
    assert "secret" not in repr(found)
    monkeypatch.setenv("PACELINE_ROLE", "")
    assert environment().role is None
