"""TLS certificates of a program: read from a folder, tested, and put into contexts of ``ssl``.

A folder is a mounted Secret of type ``kubernetes.io/tls``: ``tls.crt`` (the certificate and its chain), ``tls.key``,
and, for mutual TLS, ``ca.crt`` (one certificate authority or several, so that a new one is trusted before the old one
goes).
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHAIN, KEY, AUTHORITIES = "tls.crt", "tls.key", "ca.crt"
# The kubelet writes a new version of a Secret beside the old one, and then points this link at it.
VERSION_LINK = "..data"


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
