"""The errors of the serving process.

::

    EngineError
      SettingsError          the command line is wrong; exit status 2
      UnsupportedVllmError   another vLLM than the one the hooks are written against; exit status 3
      StartError             a port is taken, the model cannot be read; exit status 4
      RdmaError              RDMA is required and cannot be used; exit status 6
      ModelRefusedError      the model cannot be served, or vLLM refuses it; exit status 7
      SubmitRefusedError     one request is wrong; answered by its slot's Finished with REFUSED

Everything else that escapes ends the process, because a supervisor restarts it faster than it heals.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of this program's errors."""

    exit_status = 1
    # Whether another try with the same command line, model and program would end the same.
    is_permanent = False


class SettingsError(EngineError):
    """The command line is wrong; the message names the option, the value and the limit."""

    exit_status = 2
    is_permanent = True


class UnsupportedVllmError(EngineError):
    """Another vLLM than the one that the hooks are written against."""

    exit_status = 3
    is_permanent = True


class StartError(EngineError):
    """The engine cannot start; the message names what is in the way."""

    exit_status = 4


class RdmaError(EngineError):
    """RDMA is required and cannot be used; the message says what is missing. The operator knows the exit status."""

    exit_status = 6


class ModelRefusedError(EngineError):
    """The model cannot be served by this engine; the message says why. Launcher and operator know the exit status."""

    exit_status = 7
    is_permanent = True


class SubmitRefusedError(EngineError):
    """A request that this engine cannot run; the message names the field, the value and the limit."""
