"""The TLS settings of a node, and the TLS contexts (Python's objects for encrypted connections) made from them."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from os import PathLike

from paceline.environment import Environment
from paceline.errors import UsageError

_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class TLS:
    """The PEM files with a node's certificate and key, and the trusted authorities. With TLS, nodes use only TCP."""

    cert: str | PathLike[str] | None = None
    """This node's certificate with its chain. Required for servers, optional for clients."""
    key: str | PathLike[str] | None = None
    """The private key of ``cert``; None if it is in the same file."""
    ca: str | PathLike[str] | None = None
    """The certificates of the trusted authorities. With this file, servers require certificates from clients."""

    @classmethod
    def of_files(
        cls, cert: str | PathLike[str] | None, key: str | PathLike[str] | None, ca: str | PathLike[str] | None
    ) -> TLS | None:
        """Create the TLS settings from the given files. Return None if no file is given."""
        return None if cert is None and key is None and ca is None else cls(cert=cert, key=key, ca=ca)

    @classmethod
    def of_environment(cls, variables: Environment) -> TLS | None:
        """Create the TLS settings from ``PACELINE_TLS_…``. Raises UsageError, with the variable, for a missing file."""
        files = {"CERT": variables.tls_cert, "KEY": variables.tls_key, "CA": variables.tls_ca}
        for name, file in files.items():
            if file is not None and not file.is_file():
                raise UsageError(f"PACELINE_TLS_{name}={file}: there is no such file. Pass a PEM file, or unset it")
        return cls.of_files(*files.values())

    def server_context(self) -> ssl.SSLContext:
        """Create a server's TLS context. Raises UsageError for a missing file or certificate."""
        if self.cert is None:
            raise UsageError("a server needs a certificate for TLS. Pass TLS(cert=...), or set PACELINE_TLS_CERT")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load(context)
        if self.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self) -> ssl.SSLContext:
        """Create a client's TLS context. Without ``ca``, the client trusts the system's authorities."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks the certificate and its host name
        if self.ca is None:
            context.load_default_certs()
        self._load(context)
        return context

    def certificate(self) -> bytes:
        """Return this node's certificate (DER). Raises UsageError if the file has none."""
        assert self.cert is not None
        with open(self.cert, encoding="ascii", errors="replace") as file:
            found = _CERTIFICATE.search(file.read())
        if found is None:
            raise UsageError(f"{self.cert} contains no certificate (PEM)")
        return ssl.PEM_cert_to_DER_cert(found.group())

    def _load(self, context: ssl.SSLContext) -> None:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
            if self.ca is not None:
                context.load_verify_locations(self.ca)
        except OSError as error:  # ssl.SSLError is a subclass
            files = ", ".join(str(file) for file in (self.cert, self.key, self.ca) if file is not None)
            raise UsageError(f"cannot use the TLS files {files}: {error}") from None
