"""What can go wrong with the test cluster itself."""

from __future__ import annotations


class TestbedError(Exception):
    """The cluster cannot be made or does not come up; the message says why and where to look.

    * ``MissingError``: this machine lacks something; the message says what to install or to do.
    * ``NotReachedError``: something did not become ready in time.
    """

    __test__ = False  # pytest would take the name for a test's


class MissingError(TestbedError):
    """This machine lacks something."""


class NotReachedError(TestbedError):
    """Something did not become ready in time."""
