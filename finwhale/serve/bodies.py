"""The bytes of a request's body: media type, content coding, limits of size, time and all bodies.

A coded body is decoded while it comes, so one that grows over the limit is refused at once and
never held as a whole. It refuses other media types than JSON (a page of another origin could send
any other kind without asking first), codings that it does not take, and bytes behind a coded body.
A newcomer's mistake: checking the length of the coded body alone; 8 kB of gzip can be 8 MB.
Source: RFC 9110 sections 8.4 and 15.5.16; RFC 1950 to 1952 for the codings.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.requests import Request

from finwhale.config.server import ServerConfig
from finwhale.serve.errors import (
    InvalidRequestError,
    MediaTypeError,
    OverloadedError,
    RateLimitError,
    SlowRequestError,
    TooLargeError,
)

# What is decoded between two looks of the event loop at others: about a millisecond.
_PIECE_BYTES = 256 << 10
_ACCEPTED = "gzip, deflate, identity"


class BodyRoom:
    """The bytes of bodies that arrive or are read, of one server; used in its event loop alone.

    All together may be `max_bodies_bytes`, those of one tenant half of it; without keys all are of
    one tenant, "", which may have all.
    """

    def __init__(self, config: ServerConfig) -> None:
        """Begin empty."""
        self._limit, self.num_bytes = config.max_bodies_bytes, 0
        self._by_tenant: Counter[str] = Counter()

    @contextmanager
    def part(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Give a function that takes room for more bytes of one body; all of it ends with this.

        The function raises OverloadedError where there is no room, RateLimitError where there is
        none for this tenant.
        """
        own = 0
        most = self._limit // 2

        def take(num_bytes: int) -> None:
            nonlocal own
            if tenant and self._by_tenant[tenant] + num_bytes > most:
                error, held, limit = RateLimitError, self._by_tenant[tenant], most
            elif self.num_bytes + num_bytes > self._limit:
                error, held, limit = OverloadedError, self.num_bytes, self._limit
            else:
                own += num_bytes
                self.num_bytes += num_bytes
                self._by_tenant[tenant] += num_bytes
                return
            raise error(
                f"bodies of {held} bytes are being read, {limit} may; try again later",
                code="overloaded",
                retry_after_s=1,
            )

        try:
            yield take
        finally:
            self.num_bytes -= own
            self._by_tenant[tenant] -= own
            if not self._by_tenant[tenant]:
                del self._by_tenant[tenant]


async def read_body(
    request: Request, config: ServerConfig, take: Callable[[int], None], *, limit: int
) -> bytes:
    """Return the whole body, decoded.

    take   called with the bytes of each part, as `BodyRoom.part` gives it
    limit  longest body, decoded

    Raises MediaTypeError, TooLargeError, SlowRequestError, InvalidRequestError for a broken coding,
    what `take` raises, and starlette's ClientDisconnect where the client leaves.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise MediaTypeError(
            f"content-type: got {kind[:80]!r}, expected 'application/json'", code="media_type"
        )
    coding = ", ".join(request.headers.getlist("content-encoding")).strip().lower() or "identity"
    decoder = _decoder(coding)
    too_large = TooLargeError(f"body: longer than {limit} bytes; send less", code="body_too_large")
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told[:20]) > limit:
        raise too_large
    parts: list[bytes] = []
    size = size_sent = 0
    try:
        async with asyncio.timeout(config.body_timeout_s):
            async for sent in request.stream():
                size_sent += len(sent)
                if size_sent > limit:
                    raise too_large
                for part in (sent,) if decoder is None else decoder.decode(sent):
                    size += len(part)
                    if size > limit:
                        raise too_large
                    take(len(part))
                    parts.append(part)
                    if decoder is not None:
                        await asyncio.sleep(0)
    except TimeoutError:
        want = f"within {config.body_timeout_s:g} s"
        raise SlowRequestError(f"body: expected whole {want}", code="slow_body") from None
    if decoder is not None:
        decoder.finish()
    return b"".join(parts)


def _decoder(coding: str) -> _Decoder | None:
    """Return what undoes a content coding; None where there is nothing to undo."""
    if coding == "identity":
        return None
    # x-gzip is another name of gzip: RFC 9110 section 8.4.1.3.
    if coding in ("gzip", "x-gzip", "deflate"):
        return _Decoder(coding)
    raise MediaTypeError(
        f"content-encoding: got {coding[:80]!r}, expected one of {_ACCEPTED}",
        code="content_encoding",
        more_headers={"accept-encoding": _ACCEPTED},
    )


class _Decoder:
    """Undoes one coding, in pieces of bounded size."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        # A window of 2^15 bytes, with the frame of gzip or of zlib.
        self._inflate = zlib.decompressobj(31 if coding != "deflate" else 15)
        # Many clients send deflate without zlib's frame, whose first byte has 8 in its low half.
        self._may_be_raw = coding == "deflate"

    def decode(self, sent: bytes) -> Iterator[bytes]:
        """Yield what `sent` brings, none longer than a piece."""
        if sent and self._may_be_raw:
            self._may_be_raw = False
            if sent[0] & 15 != zlib.DEFLATED:
                self._inflate = zlib.decompressobj(-15)
        left = sent
        while left or not self._inflate.eof:
            if self._inflate.eof:
                raise self._broken("bytes behind its end")
            try:
                part = self._inflate.decompress(left, _PIECE_BYTES)
            except zlib.error as error:
                raise self._broken(str(error)) from None
            left = self._inflate.unconsumed_tail or self._inflate.unused_data
            if part:
                yield part
            if not left and len(part) < _PIECE_BYTES:
                return

    def finish(self) -> None:
        """Raise if the coded body is not whole."""
        if not self._inflate.eof:
            raise self._broken("it ends early")

    def _broken(self, why: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"body: not {self._coding} as content-encoding says: {why}", code="content_encoding"
        )
