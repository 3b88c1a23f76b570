"""The Secrets of a router that asks clients for API keys and encrypts, as folders."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import trustme

if TYPE_CHECKING:
    from pathlib import Path

NUM_OWNERS = 100
KEYS_OF_OWNER = 10
# The key that clients send.
KEY = "sk-of-the-benchmark-0123456789abcdef0123456789"
KEY_TYPES = {"ecdsa": trustme.KeyType.ECDSA, "rsa": trustme.KeyType.RSA}


def write_secrets(folder: Path, key_type: str = "ecdsa") -> tuple[Path, Path]:
    """Writes a certificate, and the keys of many owners, ``KEY`` among them.

    Args:
        folder: Of both.
        key_type: Of the certificate: ``ecdsa`` (P-256) or ``rsa`` (2,048 bits).

    Returns:
        The folders of the certificate and of the keys.
    """
    tls, keys = folder / "front", folder / "keys"
    for path in (tls, keys):
        path.mkdir()
    certificate = trustme.CA().issue_cert("127.0.0.1", key_type=KEY_TYPES[key_type])
    certificate.private_key_pem.write_to_path(tls / "tls.key")
    for pem in certificate.cert_chain_pems:
        pem.write_to_path(tls / "tls.crt", append=True)
    for number in range(NUM_OWNERS):
        owned = [secrets.token_urlsafe(32) for _ in range(KEYS_OF_OWNER)]
        (keys / f"owner-{number}").write_text("\n".join(owned))
    (keys / "client").write_text(KEY)
    return tls, keys
