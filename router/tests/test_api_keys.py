"""API keys: who is let in, what happens when the folder changes, and that no key ever shows."""

from __future__ import annotations

import errno
import gc
import hashlib
import pickle
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest
from certificate_files import mount_secret

from sluice_router.errors import KeysUnavailableError, UnauthenticatedError
from sluice_router.security.access_control import TokensOrKeys
from sluice_router.security.api_keys import ApiKeys
from sluice_router.security.jwt_tokens import JwtSettings, JwtVerifier

if TYPE_CHECKING:
    from pathlib import Path

ALICE, BOB = "sk-canary-alice-0001", "sk-canary-bob-000002"


def hash_of(key: str) -> bytes:
    return b"sha256:" + hashlib.sha256(key.encode()).hexdigest().encode()


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    return ApiKeys(mount_secret(tmp_path, {"alice": ALICE.encode() + b"\n", "bob": hash_of(BOB)}))


@pytest.mark.parametrize(
    ("header", "owner"),
    [
        (f"Bearer {ALICE}", "alice"),
        (f"bearer {ALICE}", "alice"),
        (f"  BEARER   {ALICE}  ", "alice"),
        (f"Bearer {BOB}", "bob"),
    ],
    ids=["as it is", "lower case", "spaces", "kept as a hash"],
)
def test_a_key_names_its_owner(keys: ApiKeys, header: str, owner: str) -> None:
    assert keys.find_owner(header) == owner
    assert keys.owners == {"alice", "bob"}


@pytest.mark.parametrize(
    ("header", "code"),
    [
        (None, "missing_api_key"),
        ("", "missing_api_key"),
        ("Bearer", "missing_api_key"),
        ("Bearer  ", "missing_api_key"),
        (ALICE, "missing_api_key"),
        (f"Basic {ALICE}", "missing_api_key"),
        ("Bearer canary-wrong-key", "invalid_api_key"),
        (f"Bearer {ALICE}x", "invalid_api_key"),
        (f"Bearer {ALICE[:-1]}", "invalid_api_key"),
        (f"Bearer {ALICE.upper()}", "invalid_api_key"),
        (f"Bearer {hash_of(BOB).decode()}", "invalid_api_key"),
        ("Bearer \udcff\udcfe canary", "invalid_api_key"),
        ("Bearer ключ-canary", "invalid_api_key"),
    ],
)
def test_nobody_else_is_let_in_and_no_key_is_quoted(keys: ApiKeys, header: str | None, code: str) -> None:
    with pytest.raises(UnauthenticatedError) as caught:
        keys.find_owner(header)
    assert caught.value.code == code
    assert "canary" not in caught.value.message


@pytest.mark.parametrize(("length", "counts"), [(15, False), (16, True), (4096, True), (4097, False)])
def test_a_key_has_16_to_4096_characters(tmp_path: Path, *, length: int, counts: bool) -> None:
    keys = ApiKeys(mount_secret(tmp_path, {"alice": b"k" * length}))
    assert keys.owners == ({"alice"} if counts else set())
    assert bool(keys.fault) is not counts


@pytest.mark.parametrize(
    ("token", "is_key"),
    [("eyJ-key-of-alice-0", True), ("key.of.alice-012", True), ("eyJ.0123456789abc.d", False)],
    ids=["begins as a token", "has the parts of one", "is one by its form"],
)
def test_beside_tokens_a_key_may_look_like_a_half_of_one(tmp_path: Path, *, token: str, is_key: bool) -> None:
    keys = ApiKeys(mount_secret(tmp_path / "keys", {"alice": token.encode()}))
    settings = JwtSettings(jwt_keys=(tmp_path / "none").as_uri(), jwt_issuer="i", jwt_audience="a")
    finder = TokensOrKeys(JwtVerifier(settings), keys)
    if is_key:
        assert finder.find_owner(f"Bearer {token}") == "alice"
        return
    with pytest.raises(KeysUnavailableError, match="no keys to check tokens with"):
        finder.find_owner(f"Bearer {token}")


def test_two_lines_let_an_owner_change_keys(tmp_path: Path) -> None:
    keys = ApiKeys(mount_secret(tmp_path, {"alice": f"{ALICE}\n\n{BOB}\r\n".encode()}))
    assert keys.find_owner(f"Bearer {ALICE}") == keys.find_owner(f"Bearer {BOB}") == "alice"
    mount_secret(tmp_path, {"alice": BOB.encode()})
    assert keys.refresh()
    assert keys.find_owner(f"Bearer {BOB}") == "alice"
    with pytest.raises(UnauthenticatedError):
        keys.find_owner(f"Bearer {ALICE}")
    assert not keys.refresh()


def test_plain_files_are_followed_too(tmp_path: Path) -> None:
    (tmp_path / "alice").write_text(ALICE)
    keys = ApiKeys(tmp_path)
    (tmp_path / "bob").write_text(BOB)
    assert keys.refresh()
    assert keys.owners == {"alice", "bob"}


@pytest.mark.parametrize(
    "line",
    [
        b"canary-short",
        b"canary with spaces in it",
        "canary-ключ-ключ".encode(),
        b"\xff\xfecanary-000000000000",
        b"sha256:canary00000000000",
    ],
    ids=["short", "spaces", "not ASCII", "no text", "no hash"],
)
def test_a_line_of_no_use_is_named_and_the_others_count(
    tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys(mount_secret(tmp_path, {"alice": ALICE.encode(), "broken": line}))
    assert keys.find_owner(f"Bearer {ALICE}") == "alice"
    assert keys.owners == {"alice"}
    assert "line 1 of broken is not used" in caplog.text
    assert "canary" not in caplog.text


def test_a_key_of_two_owners_is_the_first_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = ApiKeys(mount_secret(tmp_path, {"b": ALICE.encode(), "a": hash_of(ALICE)}))
    assert keys.find_owner(f"Bearer {ALICE}") == "a"
    assert "a and b have the same key" in caplog.text


@pytest.mark.parametrize(
    "files", [None, {}, {"alice": b"\n"}, {"alice": b"short"}], ids=["none", "no files", "nothing", "no use"]
)
def test_without_keys_nobody_is_let_in_until_there_are_some(
    tmp_path: Path, files: dict[str, bytes] | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder = tmp_path / "keys"
    if files is not None:
        mount_secret(folder, files)
    keys = ApiKeys(folder)
    assert str(folder) in keys.fault
    assert "all are refused" in keys.fault
    assert keys.fault in caplog.text
    for header in (None, "Bearer ", "Bearer short", f"Bearer {ALICE}"):
        with pytest.raises(KeysUnavailableError):
            keys.find_owner(header)
    mount_secret(folder, {"alice": ALICE.encode()})
    assert keys.refresh()
    assert keys.fault == ""
    assert "1 keys of 1 owners are in force" in caplog.text
    assert keys.find_owner(f"Bearer {ALICE}") == "alice"
    mount_secret(folder, {})
    assert keys.refresh()
    with pytest.raises(KeysUnavailableError):
        keys.find_owner(f"Bearer {ALICE}")


def test_a_folder_that_cannot_be_read_for_a_moment_is_read_again(
    keys: ApiKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What hinders the read need not show in the folder, as where too many files are open."""
    mount_secret(tmp_path, {"alice": ALICE.encode()})
    with monkeypatch.context() as patch:
        patch.setattr(keys, "_read", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        assert [keys.refresh() for _ in range(3)] == [True, False, False]
        assert caplog.text.count("Too many open files") == 1
        with pytest.raises(KeysUnavailableError):
            keys.find_owner(f"Bearer {ALICE}")
    assert keys.refresh()
    assert (keys.fault, keys.find_owner(f"Bearer {ALICE}")) == ("", "alice")
    assert not keys.refresh()


def test_a_folder_that_was_away_and_is_back_as_it_was_is_read_again(keys: ApiKeys, tmp_path: Path) -> None:
    away = tmp_path.rename(tmp_path.with_name("away"))
    assert keys.refresh()
    with pytest.raises(KeysUnavailableError):
        keys.find_owner(f"Bearer {ALICE}")
    away.rename(tmp_path)
    assert keys.refresh()
    assert (keys.fault, keys.find_owner(f"Bearer {ALICE}")) == ("", "alice")


def test_keys_are_neither_kept_nor_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    keys = ApiKeys(mount_secret(tmp_path, {"alice": ALICE.encode(), "bob": hash_of(BOB)}))
    keys.find_owner(f"Bearer {ALICE}")
    gc.collect()
    kept = pickle.dumps(vars(keys)) + caplog.text.encode()
    for secret in (ALICE, BOB, hashlib.sha256(ALICE.encode()).hexdigest(), hashlib.sha256(BOB.encode()).hexdigest()):
        assert secret.encode() not in kept
    for key in (ALICE, BOB):
        assert hashlib.sha256(key.encode()).digest() not in kept
