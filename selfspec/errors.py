"""The one exception users are meant to read: what was given, what is allowed, what to do."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in what the caller asked for. Entry points print it as one line and exit with code 1."""
