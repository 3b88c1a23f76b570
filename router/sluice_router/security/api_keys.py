"""API keys that clients send as bearer tokens: read from a mounted Secret, kept as digests.

Each file is named after an owner and holds a key per line, as it is or as ``sha256:`` and 64 hex digits. While the
folder cannot be read or holds no key, every request is refused, and the router is not ready.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
from pathlib import Path

from sluice.certificates import find_version, stamp_folder
from sluice_router.errors import MIN_RETRY_S, KeysUnavailableError, UnauthenticatedError

logger = logging.getLogger(__name__)

# Shorter keys could be guessed by trying.
MIN_KEY_CHARACTERS = 16
# A Secret's own limit is 1 MiB; headers end at 16 KiB.
MAX_KEY_CHARACTERS = 4096
HASH = re.compile(r"sha256:([0-9a-fA-F]{64})")
# What a header can carry (RFC 6750 allows less).
KEY = re.compile(rf"[!-~]{{{MIN_KEY_CHARACTERS},{MAX_KEY_CHARACTERS}}}")
SCHEME = "bearer"


def read_bearer(authorization: str | None, what: str) -> str:
    """Reads the key or token of a request.

    Args:
        authorization: Its header of that name; None: it has none.
        what: What is asked for.

    Raises:
        UnauthenticatedError: There is none.
    """
    scheme, _, token = (authorization or "").strip().partition(" ")
    if scheme.lower() != SCHEME or not token.strip():
        message = f"{what} is required; send it in the header Authorization, as Bearer KEY"
        raise UnauthenticatedError(message, code="missing_api_key")
    return token.strip()


class ApiKeys:
    """The keys in force.

    Args:
        folder: A file per owner.

    Attributes:
        fault: Why nobody is let in; empty while somebody can be.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Keys are kept as a keyed BLAKE2b of their SHA-256 under this secret: look-up times reveal nothing about a
        # digest. Each request needs one, and an HMAC takes four times as long.
        self._secret = secrets.token_bytes(32)
        self._stamp: tuple[object, ...] | None = None
        self._owners: dict[bytes, str] = {}
        self.fault = ""
        self.refresh()

    @property
    def owners(self) -> frozenset[str]:
        """Everybody who has a key."""
        return frozenset(self._owners.values())

    def refresh(self) -> bool:
        """Reads the folder again if it has changed; returns whether it had."""
        stamp = stamp_folder(self._folder)
        if stamp == self._stamp:
            return False
        fault_before = self.fault
        try:
            self._owners = self._read()
            self._stamp = stamp
            self.fault = "" if self._owners else f"{self._folder} holds no key that can be used; all are refused"
        except OSError as error:
            # It is read again next time: what hindered the read may end, and leave no trace in the folder.
            self._owners, self._stamp = {}, None
            self.fault = f"{self._folder} cannot be read: {error.strerror}; all are refused"
            if self.fault == fault_before:
                return False
        if self.fault:
            logger.error("API keys: %s", self.fault)
        else:
            logger.info("API keys: %d keys of %d owners are in force", len(self._owners), len(self.owners))
        return True

    def find_owner(self, authorization: str | None) -> str:
        """Finds whose key a request carries.

        Args:
            authorization: Its header of that name; None: it has none.

        Raises:
            KeysUnavailableError: There are no keys.
            UnauthenticatedError: The key is missing or is nobody's.
        """
        if self.fault:
            message = "this router cannot read its API keys; try again later"
            raise KeysUnavailableError(message, retry_after_s=MIN_RETRY_S)
        token = read_bearer(authorization, "an API key")
        digest = hashlib.sha256(token.encode(errors="surrogateescape")).digest()
        owner = self._owners.get(self._hide(digest))
        if owner is None:
            raise UnauthenticatedError("the API key is not valid")
        return owner

    def _hide(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=32).digest()

    def _read(self) -> dict[bytes, str]:
        version = find_version(self._folder)
        owners: dict[bytes, str] = {}
        # In order of names, so that every router gives a key that stands twice to the same owner.
        for entry in sorted(os.scandir(version), key=lambda entry: entry.name):
            # ConfigMaps and editors keep files of their own beside ours; they begin with a dot.
            if entry.is_file() and not entry.name.startswith("."):
                self._read_owner(version / entry.name, owners)
        return owners

    def _read_owner(self, path: Path, owners: dict[bytes, str]) -> None:
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            key = line.strip()
            if not key:
                continue
            hashed = HASH.fullmatch(key)
            if hashed:
                digest = bytes.fromhex(hashed[1])
            elif KEY.fullmatch(key) and not key.startswith("sha256:"):
                digest = hashlib.sha256(key.encode()).digest()
            else:
                logger.error(
                    "API keys: line %d of %s is not used: %d to %d printable ASCII characters without spaces, or "
                    "sha256: and 64 hex digits, are needed",
                    number,
                    path.name,
                    MIN_KEY_CHARACTERS,
                    MAX_KEY_CHARACTERS,
                )
                continue
            owner = owners.setdefault(self._hide(digest), path.name)
            if owner != path.name:
                logger.error("API keys: %s and %s have the same key; it counts as %s's", owner, path.name, owner)
