"""Every error that a user can act on, each with the exit code that documents it.

    Eagle3PackError
    ├── UsageError         2  the command line asks for something that cannot be done
    ├── InputError         3  a file or a model is not what it must be
    │   └── UnsupportedDraftError  the draft is sound, but this arithmetic does not fit it
    ├── PermissionDenied   4  authentication, or a file that may not be read or written
    ├── ConflictError      5  the output exists, or something changed under us
    ├── RefusedError       6  a remote service said no
    ├── TransportError     7  network or disk gave out; nothing is half-written, run it again
    ├── MismatchError      8  what was published is not what was sent
    └── PartialError       9  one hub of two succeeded

Exit code 1 is kept for our own faults: those are not caught and show as an internal error.
"""

from __future__ import annotations


class Eagle3PackError(Exception):
    """Base of every error a user can act on.

    Args:
        problem: what is wrong and what was expected, one sentence without a full stop at the end.
        where: the file, key, tensor or option that it concerns; printed before the problem.
        hint: what to do next, one sentence.
    """

    exit_code = 1

    def __init__(self, problem: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(f"{where}: {problem}" if where else problem)
        self.problem = problem
        self.where = where
        self.hint = hint


class UsageError(Eagle3PackError):
    """The command line asks for something that cannot be done."""

    exit_code = 2


class InputError(Eagle3PackError):
    """A file or a model is not what it must be."""

    exit_code = 3


class UnsupportedDraftError(InputError):
    """The draft is sound, but the arithmetic of this command does not fit it."""


class PermissionDenied(Eagle3PackError):
    """Authentication failed, or a file may not be read or written."""

    exit_code = 4


class ConflictError(Eagle3PackError):
    """The output exists already, or something changed while we worked."""

    exit_code = 5


class RefusedError(Eagle3PackError):
    """A remote service refused the request."""

    exit_code = 6


class TransportError(Eagle3PackError):
    """Network or disk gave out; nothing is half-written and the command can be run again."""

    exit_code = 7


class MismatchError(Eagle3PackError):
    """What stands on a hub after publishing is not what was sent."""

    exit_code = 8


class PartialError(Eagle3PackError):
    """One hub of several succeeded."""

    exit_code = 9
