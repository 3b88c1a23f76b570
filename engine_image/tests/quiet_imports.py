"""Imports modules that import vLLM, whose warnings are its own affair."""

from __future__ import annotations

import importlib
import warnings
from typing import Any


def import_quietly(name: str) -> Any:
    """The module of this name; what is imported with it may warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
