"""Errors of the test cluster itself."""

from __future__ import annotations


class TestbedError(Exception):
    """The cluster cannot be made or does not come up. The message names the cause and where to read more.

    * ``MissingError``: this machine lacks something; the message names what to install or to do.
    * ``NotReachedError``: something did not become ready in time.
    """

    __test__ = False  # pytest takes the name for a test's


class MissingError(TestbedError):
    """This machine lacks something."""


class NotReachedError(TestbedError):
    """Something did not become ready in time."""
