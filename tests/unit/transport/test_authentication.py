from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from paceline.environment import Environment, environment
from paceline.errors import AuthenticationError, ProtocolError, UsageError, VersionError
from paceline.transport import TLS, Hello, SocketTransport, make_token, read_token
from paceline.transport.authentication import Proof, decode, encode_hello, prove, verify

CLIENT, SERVER = b"c" * 32, b"s" * 32


def make_proof(token: str = "token", label: str = "client", hello: Hello | None = None) -> Proof:
    mine = encode_hello(hello or Hello(role="worker", rank=3, extra={"slots": 4}))
    return Proof(mine, CLIENT, prove(token, label, CLIENT, SERVER, mine))


def test_a_proof_brings_the_hello() -> None:
    hello = verify("token", "client", CLIENT, SERVER, make_proof())
    assert (hello.role, hello.rank, hello.extra, hello.protocol) == ("worker", 3, {"slots": 4}, 1)
    assert hello.paceline


def test_whatever_was_altered_is_noticed() -> None:
    proof = make_proof()
    altered = msgspec.structs.replace(proof, hello=proof.hello.replace(b"worker", b"wonder"))
    short = Proof(proof.hello, b"", prove("token", "client", b"", SERVER, proof.hello))
    for given, label, client, server in (
        (make_proof(token="tokem"), "client", CLIENT, SERVER),
        (make_proof(label="server"), "client", CLIENT, SERVER),  # reflected
        (proof, "client", CLIENT, b"t" * 32),  # replayed
        (proof, "client", b"d" * 32, SERVER),
        (altered, "client", CLIENT, SERVER),
        (msgspec.structs.replace(proof, proof=b""), "client", CLIENT, SERVER),
        (short, "client", b"", SERVER),
    ):
        with pytest.raises(AuthenticationError, match="does not hold"):
            verify("token", label, client, server, given)


@pytest.mark.parametrize("protocol", [1, 8])
def test_versions_are_named(protocol: int) -> None:
    proof = make_proof(hello=Hello(role="worker", protocol=protocol, paceline="9.9"))
    named = rf"version {protocol} \(paceline 9\.9\), this process version 1 \(paceline 0"
    with pytest.raises(VersionError, match=named):
        verify("token", "client", CLIENT, SERVER, proof)


def test_garbage_is_no_handshake() -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        decode(b"\xc1", Proof)


def test_tokens(tmp_path: Path) -> None:
    token = make_token()
    assert len(token) == 43
    assert token != make_token()
    file = tmp_path / "token"
    file.write_text(f"  {token}\n")
    assert read_token(file) == token
    file.write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        read_token(file)
    with pytest.raises(UsageError, match=r"cannot read the cluster's token from .*missing"):
        read_token(tmp_path / "missing")
    with pytest.raises(UsageError, match="is empty"):
        SocketTransport("")


def test_tls_files_must_be_there(tmp_path: Path) -> None:
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
    told = environment(
        {
            "PACELINE_ROLE": "server",
            "PACELINE_SCHEDULER": "tcp://a:1",
            "PACELINE_TOKEN": "secret",
            "PACELINE_CACHE_DIR": "/var/cache",
        }
    )
    assert told == Environment(role="server", scheduler="tcp://a:1", token="secret", cache_dir=Path("/var/cache"))
    assert "secret" not in repr(told)
    monkeypatch.setenv("PACELINE_ROLE", "")
    assert environment().role is None
