"""Why a turn is not made. Each kind has one meaning for whoever asked, in-process or over HTTP; see also SessionOverError."""

from __future__ import annotations


class RefusedRequestError(ValueError):
    """The request itself is at fault; the same one will be refused again. One sentence."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        """The part of the request that is at fault, as `messages[2].content`."""
        self.code = code


class ContextExceededError(RefusedRequestError):
    """The conversation leaves no room for a further token."""

    def __init__(self, message: str):
        super().__init__(message, "messages", "context_length_exceeded")


class TurnLimitError(RefusedRequestError):
    """The session has had all its turns."""

    def __init__(self, message: str):
        super().__init__(message, None, "turn_limit_exceeded")


class SessionBusyError(Exception):
    """Another turn of the same session did not end in time for this one to begin; it may be tried again."""


class TurnTimeoutError(Exception):
    """The turn did not end in time and left no trace; it may be tried again."""


class TooManySessionsError(Exception):
    """No room for a further session now; it may be tried again."""
