"""Rotation of TLS certificates: a folder is read again when it changes, and open connections go on."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from sluice.certificates import CertificateError, read_certificates, stamp_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

# Seconds between two checks of a folder; the kubelet itself updates once a minute.
REFRESH_S = 1.0


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
