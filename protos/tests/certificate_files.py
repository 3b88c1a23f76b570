"""Certificates on disk, for the tests of every part: issued on the spot, laid out as the kubelet lays out a Secret."""

from __future__ import annotations

import itertools
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    import trustme

_numbers = itertools.count(1)


def mount_secret(folder: Path, files: dict[str, bytes]) -> Path:
    """Replaces a folder's files all at once, as the kubelet does: in a new version, to which a link then points."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "..data"
    old = link.resolve() if link.is_symlink() else None
    version = folder / f"..version-{next(_numbers)}"
    version.mkdir()
    for name, content in files.items():
        (version / name).write_bytes(content)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    turned = folder / "..data_tmp"
    turned.symlink_to(version.name)
    turned.rename(link)
    for entry in folder.iterdir():
        if not entry.name.startswith("..") and entry.name not in files:
            entry.unlink()
    if old is not None:
        shutil.rmtree(old)
    return folder


def make_files(
    authority: trustme.CA, *names: str, trusted: tuple[trustme.CA, ...] = (), not_after: datetime | None = None
) -> dict[str, bytes]:
    """Issues a certificate, as the entries of a Secret.

    Args:
        authority: Signs it.
        names: It is for these.
        trusted: Authorities in ca.crt; the signer alone when empty.
        not_after: End of its time.
    """
    leaf = authority.issue_cert(*names, not_after=not_after)
    return {
        "tls.crt": b"".join(pem.bytes() for pem in leaf.cert_chain_pems),
        "tls.key": leaf.private_key_pem.bytes(),
        "ca.crt": b"".join(each.cert_pem.bytes() for each in trusted or (authority,)),
    }
