"""Objects of the API server as plain dicts, and what all of them have.

Typed models of the client would drop fields that they do not know on the way back to the server.
"""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]


def name_of(content: Object) -> str:
    """The name of an object."""
    name: str = content["metadata"]["name"]
    return name


def uid_of(content: Object) -> str:
    """The uid of an object; empty before it exists."""
    uid: str = content["metadata"].get("uid", "")
    return uid


def annotations_of(content: Object) -> dict[str, str]:
    """The annotations of an object."""
    return content["metadata"].get("annotations") or {}


def labels_of(content: Object) -> dict[str, str]:
    """The labels of an object."""
    return content["metadata"].get("labels") or {}
