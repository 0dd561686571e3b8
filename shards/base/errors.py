"""Errors a user can act on: what failed, where, what was found, what was expected, the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def visible(text: str) -> str:
    """``text`` with what is no printable character spelt out (``\\x1b``, ``\\n``, ``\\u202e``).

    Names and settings that somebody else chose can then neither steer a terminal nor end a line.
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


class GdistillError(Exception):
    """A failure told in one line. Commands print it and leave with ``exit_code``.

    Empty parts are left out of the line.

    Args:
        what: The failure in a few words.
        where: The file, field, row or option concerned.
        got: What was found there.
        expected: What should have been found.
        remedy: What the user can do about it.
    """

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        where: object = "",
        got: object = "",
        expected: object = "",
        remedy: str = "",
    ) -> None:
        self.what = what
        self.where = str(where)
        self.got = str(got)
        self.expected = str(expected)
        self.remedy = remedy
        super().__init__(self._line())

    def _line(self) -> str:
        parts = [f"{self.what} [{self.where}]" if self.where else self.what]
        if self.got:
            parts.append(f"got {self.got}")
        if self.expected:
            parts.append(f"expected {self.expected}")
        if self.remedy:
            parts.append(self.remedy)
        return "; ".join(visible(" ".join(part.split())) for part in parts)


class UsageError(GdistillError):
    """The request itself is wrong (an option, a config key, a path): exit code 2."""

    exit_code = 2


class IntegrityError(GdistillError):
    """Stored data are missing, truncated or altered; nothing was returned from them."""


def did_you_mean(
    name: str, known: Iterable[str], otherwise: str = "", *, cutoff: float = 0.4
) -> str:
    """A remedy that names the known name nearest to ``name``; ``otherwise`` if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else otherwise


def first_line(error: BaseException) -> str:
    """The first line of another library's error, or its type if it says nothing.

    Of a compiler's, which begins with which compiler it was, that of what went wrong in it.
    """
    while isinstance(inner := getattr(error, "inner_exception", None), BaseException):
        error = inner
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
