"""TLS certificates of a program: read from a folder, tested, and read again when the folder changes.

A folder is a mounted Secret of type ``kubernetes.io/tls``: ``tls.crt`` (the certificate and its chain), ``tls.key``,
and, for mutual TLS, ``ca.crt`` (one certificate authority or several, so that a new one is trusted before the old one
goes).
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

CHAIN, KEY, AUTHORITIES = "tls.crt", "tls.key", "ca.crt"
# The kubelet writes a new version of a Secret beside the old one, and then points this link at it.
VERSION_LINK = "..data"
# Seconds between two checks of a folder; the kubelet itself updates once a minute.
REFRESH_S = 1.0


class CertificateError(ValueError):
    """A folder's certificate cannot be used; the message names the folder and says why, never what a file holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """The tested contents of one version of a folder.

    Args:
        chain: The certificate and its chain, as PEM.
        key: Its private key, as PEM.
        authorities: Certificate authorities of the other side, as PEM; empty: the other side shows no certificate.
        names: DNS names that the certificate is for.
        expires_unix_s: When it expires, as Unix time.
    """

    chain: bytes
    key: bytes = field(repr=False)
    authorities: bytes = b""
    names: tuple[str, ...] = ()
    expires_unix_s: float = 0.0


def read_certificates(folder: Path, *, is_mutual: bool) -> Certificates:
    """Reads a folder and tests its contents by a handshake in memory.

    The test shows that key and certificate belong together, that the certificate is in its time, and, with ``ca.crt``,
    that it is valid for server and client alike.

    Args:
        folder: The folder.
        is_mutual: Mutual TLS: ``ca.crt`` is required.

    Raises:
        CertificateError: Something is missing or cannot be used.
    """
    version = find_version(folder)
    try:
        certificates = Certificates(
            chain=(version / CHAIN).read_bytes(),
            key=(version / KEY).read_bytes(),
            authorities=(version / AUTHORITIES).read_bytes() if is_mutual else b"",
        )
    except OSError as error:
        name = Path(error.filename or folder).name
        raise CertificateError(f"{folder}: {name} cannot be read: {error.strerror}") from error
    if is_mutual and not certificates.authorities.strip():
        raise CertificateError(f"{folder}: {AUTHORITIES} is empty; mutual TLS requires it")
    try:
        shown = _shake_hands(certificates)
    except (ssl.SSLError, ValueError) as error:
        raise CertificateError(f"{folder}: {describe_fault(error)}") from error
    return Certificates(
        chain=certificates.chain,
        key=certificates.key,
        authorities=certificates.authorities,
        names=tuple(value for kind, value in shown.get("subjectAltName", ()) if kind == "DNS"),
        expires_unix_s=float(ssl.cert_time_to_seconds(shown["notAfter"])),
    )


def find_version(folder: Path) -> Path:
    """The folder with one whole version of a mounted Secret; the folder itself where there are no versions."""
    link = folder / VERSION_LINK
    return link.resolve() if link.is_symlink() else folder


def stamp_folder(folder: Path) -> tuple[object, ...]:
    """A value that changes when a folder's files do: its version, and name, time, size and inode of each file."""
    version = find_version(folder)
    try:
        entries = sorted((entry.name, entry.stat()) for entry in os.scandir(version) if entry.is_file())
    except OSError:
        return (str(version),)
    return (str(version), *((name, stat.st_mtime_ns, stat.st_size, stat.st_ino) for name, stat in entries))


class CertificateFolder:
    """The newest usable certificates of a folder.

    Certificates that fail the test are not used: a program does not start with them, and one that runs keeps what it
    has. Connections keep the certificate that they began with; new ones get the newest.

    Args:
        folder: The folder.
        is_mutual: Mutual TLS.

    Attributes:
        current: The certificates in force.

    Raises:
        CertificateError: The folder has no usable certificates.
    """

    def __init__(self, folder: Path, *, is_mutual: bool) -> None:
        self.folder = folder
        self._is_mutual = is_mutual
        self._fault = ""
        self._stamp = stamp_folder(folder)
        self.current = read_certificates(folder, is_mutual=is_mutual)

    def refresh(self) -> bool:
        """Reads the folder again if it has changed, or was not usable the last time.

        Returns:
            True when other certificates are in force now.
        """
        stamp = stamp_folder(self.folder)
        if stamp == self._stamp and not self._fault:
            return False
        try:
            newest = read_certificates(self.folder, is_mutual=self._is_mutual)
        except CertificateError as error:
            # A writer may be half-way, a clock may be behind: the next call tries again. Each fault is logged once.
            if str(error) != self._fault:
                logger.warning("the certificate in force stays: %s", error)
            self._fault = str(error)
            return False
        self._stamp, self._fault = stamp, ""
        if newest == self.current:
            return False
        self.current = newest
        until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(newest.expires_unix_s))
        logger.info("%s: new certificate for %s until %s", self.folder, ", ".join(newest.names) or "no name", until)
        return True


async def keep_fresh(refreshes: Sequence[Callable[[], object]], interval_s: float = REFRESH_S) -> None:
    """Calls functions like ``CertificateFolder.refresh`` for ever.

    Args:
        refreshes: The functions; each reads a few files.
        interval_s: Pause between two calls, in seconds.
    """
    while True:
        await asyncio.sleep(interval_s)
        for refresh in refreshes:
            refresh()


def load_chain(context: ssl.SSLContext, certificates: Certificates) -> None:
    """Sets the certificate of a context's new connections; existing connections keep theirs."""
    # OpenSSL reads files only: it gets one in memory, so that the key never reaches a disk.
    handle = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(handle, certificates.key + b"\n" + certificates.chain)
        # With an empty password an encrypted key is refused; without one OpenSSL prompts on the terminal.
        context.load_cert_chain(f"/proc/self/fd/{handle}", password="")
    finally:
        os.close(handle)


def make_server_context(certificates: Certificates) -> ssl.SSLContext:
    """Makes a server's context: TLS 1.2 or newer, and mutual TLS where there are authorities."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_chain(context, certificates)
    if certificates.authorities:
        _trust(context, certificates.authorities)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def make_client_context(certificates: Certificates) -> ssl.SSLContext:
    """Makes a client's context for mutual TLS: it checks the server's certificate and name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_chain(context, certificates)
    _trust(context, certificates.authorities)
    return context


def _trust(context: ssl.SSLContext, authorities: bytes) -> None:
    """Trusts authorities, intermediate ones too, as gRPC does."""
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=authorities.decode("ascii"))


def make_pinned_context(folder: Path) -> ssl.SSLContext:
    """Makes a client's context that trusts the very certificate in a folder, whatever name it is for."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cafile=str(find_version(folder) / CHAIN))
    return context


def describe_fault(error: Exception) -> str:
    """Describes OpenSSL's complaint about a certificate, without its source lines."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not valid: {error.verify_message}"
    known = error.reason if isinstance(error, ssl.SSLError) else None
    reason = known or "not in PEM, or the key asks for a password"
    words = str(reason).replace("_", " ").lower().replace("pem", "PEM")
    return f"certificate, key or authorities cannot be used: {words}"


def _shake_hands(certificates: Certificates) -> Any:
    """Connects a server and a client in memory; returns the server's certificate as the client sees it.

    Raises:
        ssl.SSLError: The handshake failed.
        ValueError: A file is not text.
    """
    server_context = make_server_context(certificates)
    if certificates.authorities:
        client_context = make_client_context(certificates)
    else:
        client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # Whether clients trust the certificate is not tested here: it counts as its own authority.
        _trust(client_context, certificates.chain)
    client_context.check_hostname = False
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context.wrap_bio(up, down, server_side=True)
    client = client_context.wrap_bio(down, up)
    for side in (client, server, client, server):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return client.getpeercert()
