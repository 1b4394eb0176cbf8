"""Every test in this folder must leave no thread and no file descriptor."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme
from tests.leftovers import nothing_leaks as nothing_leaks

from paceline.transport import TLS, SocketTransport

TOKEN = "the-token-of-tests"


@pytest.fixture
def transport() -> SocketTransport:
    return SocketTransport(TOKEN)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TLS]:
    """TLS files of one certificate authority (``ours``, ``misnamed``) and of another authority."""
    folder: Path = tmp_path_factory.mktemp("tls")
    authority, foreign = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    foreign.cert_pem.write_to_path(str(folder / "foreign-ca.pem"))

    def issue(name: str, by: trustme.CA, host: str, ca: str) -> TLS:
        path = folder / f"{name}.pem"
        by.issue_cert(host).private_key_and_cert_chain_pem.write_to_path(str(path))
        return TLS(cert=path, ca=folder / ca)

    return {
        "ours": issue("ours", authority, "127.0.0.1", "ca.pem"),
        "misnamed": issue("misnamed", authority, "example.org", "ca.pem"),
        "foreign": issue("foreign", foreign, "127.0.0.1", "foreign-ca.pem"),
        "foreign_but_trusting": issue("trusting", foreign, "127.0.0.1", "ca.pem"),
        "bare": TLS(ca=folder / "ca.pem"),
    }
