"""Where and how the service listens."""

import math
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from cluster.contract.errors import DocumentError
from cluster.errors import UserError
from cluster.serving.limits import Limits

DEFAULT_PORT: Final = 50051
"""gRPC's customary port."""

DEFAULT_MAX_MOVES: Final = 3
"""A request that ends every replica it comes to mustn't come to all of them."""

DEFAULT_RETURN_S: Final = 5.0
"""A replica's process may just have stood still. One that is started again takes longer to load."""

DRAIN_GRACE_S: Final = 30.0
"""A pod has 30 s between the signal to stop and its end, by Kubernetes' default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSettings:
    """PEM files. With `client_ca`, clients too must have a certificate (mutual TLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenSettings:
    """Port 0 takes a free one; `metrics_port` None serves no metrics. Without TLS, loopback is the only safe host."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    tls: TlsSettings | None = None
    drain_grace_s: float = DRAIN_GRACE_S
    max_moves: int = DEFAULT_MAX_MOVES
    """Of one request, from replicas that are lost or drained."""
    return_s: float = DEFAULT_RETURN_S
    """How long a request that has run waits for a replica, where there is none."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name, port in (("port", self.port), ("metrics_port", self.metrics_port or 0)):
            if not 0 <= port < 1 << 16:
                raise DocumentError(name, str(port), "from 0, for any free one, to 65535")
        for name, seconds in (("drain_grace_s", self.drain_grace_s), ("return_s", self.return_s)):
            if not 0 <= seconds < math.inf:
                raise DocumentError(name, str(seconds), "a finite number of seconds, 0 or more")
        if self.max_moves < 0:
            raise DocumentError("max_moves", str(self.max_moves), "0 or more")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings(ListenSettings):
    """What a server is started with. The token is a secret, and so not among what a config file says."""

    token: str | None = field(default=None, repr=False)


def tls_settings(certificate: Path | None, key: Path | None, client_ca: Path | None) -> TlsSettings | None:
    """TLS where there is a certificate and its key. Raises UserError for a part without the rest, or an unfit file."""
    if certificate is None and key is None and client_ca is None:
        return None
    if certificate is None or key is None:
        missing = "--tls-certificate" if certificate is None else "--tls-key"
        raise UserError("TLS", f"{missing} is missing", "give certificate and key, or none of the TLS options")
    settings = TlsSettings(certificate=certificate, key=key, client_ca=client_ca)
    check_tls(settings)
    return settings


def check_tls(settings: TlsSettings) -> None:
    """Read the files now, not when the model has been loaded. Raises UserError for one that can't be used."""
    named = ((settings.certificate, "TLS certificate"), (settings.key, "TLS key"), (settings.client_ca, "client CA"))
    for path, what in named:
        if path is not None:
            read_pem(path, what=what)


def read_token(path: Path) -> str:
    """The token that a file holds, blanks at its ends left out. Raises UserError where there is none."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"token file {path}", f"it can't be read ({error})", "check its path") from error
    if not token or not token.isascii() or any(character.isspace() for character in token):
        raise UserError(f"token file {path}", "it holds no single ASCII word", "write the token alone into it")
    return token


def read_pem(path: Path, *, what: str) -> bytes:
    """A PEM file's bytes; `what` it is, for messages. Raises UserError for a file that isn't one."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{what} {path}", f"it can't be read ({error})", "check its path") from error
    if b"-----BEGIN " not in content:
        raise UserError(f"{what} {path}", "it is no PEM file", "give one that begins with -----BEGIN")
    return content
