"""How to reach a server: address, TLS, token."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from cluster.serving.auth import METADATA_KEY, SCHEME
from cluster.serving.limits import Limits
from cluster.serving.settings import read_pem


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """PEM files. `ca` None trusts the system's authorities; `certificate` and `key` are for mutual TLS."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """HOST:PORT and what the server asks for. `tls` None is plain text."""

    address: str
    tls: ClientTls | None = None
    token: str | None = field(default=None, repr=False)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        return () if self.token is None else ((METADATA_KEY, f"{SCHEME}{self.token}"),)

    @property
    def options(self) -> list[tuple[str, Any]]:
        """Channel options: answers may be as large as a server sends them."""
        return [("grpc.max_receive_message_length", Limits().max_response_bytes)]

    def credentials(self) -> grpc.ChannelCredentials | None:
        """None for plain text. Raises UserError for a file that can't be used."""
        if self.tls is None:
            return None
        return grpc.ssl_channel_credentials(
            root_certificates=_pem(self.tls.ca, "CA"),
            private_key=_pem(self.tls.key, "client key"),
            certificate_chain=_pem(self.tls.certificate, "client certificate"),
        )


def _pem(path: Path | None, what: str) -> bytes | None:
    return None if path is None else read_pem(path, what=what)
