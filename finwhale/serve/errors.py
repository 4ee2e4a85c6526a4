"""What a request can fail with, and the error body that an `openai` client reads.

One class for each status, so that a handler never chooses a number, and each protocol writes its
own body from the same five fields. It refuses to show a traceback to a client: an unexpected
exception becomes "internal error" and the request id that finds it in the log. A newcomer's
mistake: raising one of these after the first byte of a stream, where no status can be sent any
more; there the body travels as an event. Source: spec/multimodal-serving.md section D.2.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

_LONGEST_MESSAGE = 1000
# The rooms below know one name for each field, or say what part of it is at fault.
ROOM_WORDS = {
    "conversation": "messages",
    "prefix": "messages",
    "schema": "response_format",
    "pattern": "response_format",
    "calls": "tools",
    "effort": "reasoning_effort",
    "max_new_tokens": "max_tokens",
}
_LEADING_FIELD = re.compile(r"([A-Za-z_]+)((?:\[\d+\]|\.[A-Za-z_0-9]+)*): ")


class ServeError(ValueError):
    """A request that gets no answer.

    message        one sentence that names field, value and remedy
    param          the field of the body at fault, where one is
    code           a word for programs, such as "context_length_exceeded"
    retry_after_s  when to come back; becomes the header Retry-After
    more_headers   other headers of the response, such as Accept-Encoding
    """

    status = 500
    kind = "server_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        more_headers: Mapping[str, str] | None = None,
    ) -> None:
        """Take what the error body says."""
        # A message may quote a value, and values come from outside.
        message = message[:_LONGEST_MESSAGE]
        super().__init__(message)
        self.message, self.param, self.code = message, param, code
        self.retry_after_s, self._more_headers = retry_after_s, dict(more_headers or {})

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel between processes; the defaults of ValueError would lose the keywords."""
        fields = {
            "param": self.param,
            "code": self.code,
            "retry_after_s": self.retry_after_s,
            "more_headers": self._more_headers,
        }
        return partial(type(self), **fields), (self.message,)

    @property
    def headers(self) -> dict[str, str]:
        """Headers that the status asks for."""
        own = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return {**own, **self._more_headers}


class InvalidRequestError(ServeError):
    """A body that could never be served."""

    status = 400
    kind = "invalid_request_error"


class UnauthorizedError(ServeError):
    """No API key, or none that is known."""

    status = 401
    kind = "authentication_error"


class ForbiddenError(ServeError):
    """A caller that this server does not talk to."""

    status = 403
    kind = "permission_error"


class NotFoundError(ServeError):
    """A path or a thing that does not exist."""

    status = 404
    kind = "not_found_error"


class MethodNotAllowedError(ServeError):
    """A path that exists, asked with another method."""

    status = 405
    kind = "invalid_request_error"


class SlowRequestError(ServeError):
    """A header or a body that did not arrive in time."""

    status = 408
    kind = "timeout_error"


class TooLargeError(ServeError):
    """A body over the limit."""

    status = 413
    kind = "invalid_request_error"


class MediaTypeError(ServeError):
    """A body that does not say that it is JSON, or comes in a coding that is not taken."""

    status = 415
    kind = "invalid_request_error"


class RateLimitError(ServeError):
    """One tenant has too many requests at once."""

    status = 429
    kind = "rate_limit_error"


class EngineFailedError(ServeError):
    """The engine failed on this request; the request itself may be sound."""

    status = 500
    kind = "server_error"


class OverloadedError(ServeError):
    """All tenants together have too many requests, or the server is going down."""

    status = 503
    kind = "overloaded_error"


class TimeLimitError(ServeError):
    """The answer took longer than the server allows."""

    status = 504
    kind = "timeout_error"


def in_words_of(names: Mapping[str, str], error: ServeError) -> ServeError:
    """Return the error with the field at fault as a protocol calls it.

    names  {field of a chat completion: the protocol's name of it}; other fields stay. A place
           `[3]` inside one of `names` is left out, since it counts the messages of the chat.
    """
    told = copy.copy(error)
    if error.param is not None:
        param = ROOM_WORDS.get(error.param, error.param)
        told.param = names.get(param, param)
    leading = _LEADING_FIELD.match(error.message)
    if leading is not None:
        field, place = leading.groups()
        word = ROOM_WORDS.get(field, field)
        if word in names and (names[word] != field or place.startswith("[")):
            place = ""
        told.message = f"{names.get(word, word)}{place}: {error.message[leading.end() :]}"
    return told


def openai_body(error: ServeError) -> dict[str, Any]:
    """Return {"error": {message, type, param, code}}, the body of both HTTP and stream errors."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def internal_error(request_id: str) -> ServeError:
    """Return what a client learns of an exception that nobody expected."""
    return ServeError(
        f"internal error; the server's log has it under {request_id}", code="internal_error"
    )
