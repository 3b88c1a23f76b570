"""Certificates of a program: read from a folder, tried before they are used, read again when the folder changes.

A folder is a mounted Secret of Kubernetes' kind ``kubernetes.io/tls``, or looks like one: ``tls.crt`` (the certificate,
then what chains it to its authority), ``tls.key``, and, where both sides show a certificate, ``ca.crt`` (one authority or
several, one after the other, so that a new one can be trusted before the old one is gone).

What is read is tried by a handshake in memory: key and certificate belong together, the certificate is in its time, and,
with ``ca.crt``, it passes for server and client alike. What fails is not used: a program does not start with it, and one
that runs keeps what it has. Connections keep the certificate they began with; new ones get the newest.
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
# The kubelet puts a new version of a Secret beside the old one, and then turns this link.
VERSION_LINK = "..data"
# The kubelet itself looks once a minute.
REFRESH_S = 1.0


class CertificateError(ValueError):
    """A folder's certificate cannot be used; the message names the folder and says why, never what a file holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """What one version of a folder holds, tried.

    Args:
        chain: The certificate and its chain, as PEM.
        key: Its private key, as PEM.
        authorities: Whose certificates the other side may show, as PEM; empty: it shows none.
        names: DNS names that the certificate is for.
        expires_unix_s: End of its time, as Unix time.
    """

    chain: bytes
    key: bytes = field(repr=False)
    authorities: bytes = b""
    names: tuple[str, ...] = ()
    expires_unix_s: float = 0.0


def read_certificates(folder: Path, *, is_mutual: bool) -> Certificates:
    """Reads a folder and tries what it holds.

    Args:
        folder: The folder.
        is_mutual: Both sides show a certificate: ``ca.crt`` is needed.

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
        raise CertificateError(f"{folder}: {AUTHORITIES} is empty; both sides show a certificate, so it must be there")
    try:
        shown = _try(certificates)
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
    """The folder that holds a mounted Secret's files of one version, all of them; the folder itself if it has no versions."""
    link = folder / VERSION_LINK
    return link.resolve() if link.is_symlink() else folder


def stamp_folder(folder: Path) -> tuple[object, ...]:
    """What changes when a folder's files do: its version, and name, time, size and inode of each file."""
    version = find_version(folder)
    try:
        entries = sorted((entry.name, entry.stat()) for entry in os.scandir(version) if entry.is_file())
    except OSError:
        return (str(version),)
    return (str(version), *((name, stat.st_mtime_ns, stat.st_size, stat.st_ino) for name, stat in entries))


class CertificateFolder:
    """A folder's newest certificates that can be used.

    Args:
        folder: The folder.
        is_mutual: Both sides show a certificate.

    Attributes:
        current: The certificates in force.

    Raises:
        CertificateError: There are none to begin with.
    """

    def __init__(self, folder: Path, *, is_mutual: bool) -> None:
        self.folder = folder
        self._is_mutual = is_mutual
        self._fault = ""
        self._stamp = stamp_folder(folder)
        self.current = read_certificates(folder, is_mutual=is_mutual)

    def refresh(self) -> bool:
        """Reads the folder again if it has changed, or could not be used the last time; returns what is in force changed."""
        stamp = stamp_folder(self.folder)
        if stamp == self._stamp and not self._fault:
            return False
        try:
            newest = read_certificates(self.folder, is_mutual=self._is_mutual)
        except CertificateError as error:
            # A writer may be half-way, a clock may be behind: it is tried again, and said once.
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
        refreshes: The functions; each looks at a few files.
        interval_s: Pause between two looks, in seconds.
    """
    while True:
        await asyncio.sleep(interval_s)
        for refresh in refreshes:
            refresh()


def load_chain(context: ssl.SSLContext, certificates: Certificates) -> None:
    """Has new connections of a context show a certificate; those that exist keep theirs.

    OpenSSL reads files only, so that it gets one that exists in memory alone.
    """
    handle = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(handle, certificates.key + b"\n" + certificates.chain)
        # Without a password a key that needs one is refused; with none at all OpenSSL asks the terminal.
        context.load_cert_chain(f"/proc/self/fd/{handle}", password="")
    finally:
        os.close(handle)


def make_server_context(certificates: Certificates) -> ssl.SSLContext:
    """Makes what a server's connections begin with: TLS 1.2 or newer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_chain(context, certificates)
    if certificates.authorities:
        _trust(context, certificates.authorities)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def make_client_context(certificates: Certificates) -> ssl.SSLContext:
    """Makes what a client's connections begin with: it shows its certificate, and checks the server's and its name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_chain(context, certificates)
    _trust(context, certificates.authorities)
    return context


def _trust(context: ssl.SSLContext, authorities: bytes) -> None:
    """Trusts authorities, and those that are not their own root too, as gRPC does."""
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cadata=authorities.decode("ascii"))


def make_pinned_context(folder: Path) -> ssl.SSLContext:
    """Makes what a client's connections begin with that trusts the certificate in a folder, whatever its name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cafile=str(find_version(folder) / CHAIN))
    return context


def describe_fault(error: Exception) -> str:
    """Says what OpenSSL has against a certificate, without its source lines."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate does not pass: {error.verify_message}"
    known = error.reason if isinstance(error, ssl.SSLError) else None
    reason = known or "not in PEM, or the key asks for a password"
    words = str(reason).replace("_", " ").lower().replace("pem", "PEM")
    return f"certificate, key or authorities cannot be used: {words}"


def _try(certificates: Certificates) -> Any:
    """Shakes hands with itself; returns what the client saw of the server's certificate.

    Raises:
        ssl.SSLError: It does not work.
        ValueError: It is not even text.
    """
    server_context = make_server_context(certificates)
    if certificates.authorities:
        client_context = make_client_context(certificates)
    else:
        client_context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # Whether clients trust it is their matter: here the certificate stands for itself.
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
