"""What lets a client go on with its answer."""

from __future__ import annotations

import pytest

from sluice_router.security.resume_capabilities import derive_resume_key, is_capability, make_capability


def test_capabilities_differ_and_have_their_form():
    made = {make_capability() for _ in range(100)}
    assert len(made) == 100
    assert all(is_capability(capability) for capability in made)


@pytest.mark.parametrize("text", ["", "new", "a" * 31, "a" * 33, "a" * 31 + "/", "a" * 32 + "\n"])
def test_other_texts_are_none(text):
    assert not is_capability(text)


def test_a_key_belongs_to_one_capability_owner_and_request_and_shows_none():
    capability = "a" * 32
    keys = {derive_resume_key(capability, owner, "one") for owner in ("", "team-a", "team-b")}
    keys.add(derive_resume_key("b" * 32, "team-a", "one"))
    keys.add(derive_resume_key(capability, "team-a", "two"))
    assert len(keys) == 5
    assert derive_resume_key(capability, "team-a", "one") in keys
    assert not any(capability.encode() in key or b"team" in key for key in keys)
