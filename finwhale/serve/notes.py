"""Notes: what a request was served otherwise than it asked, told in a header.

A client that sends a tool which this server cannot run gets an answer without it and a line that
names it, instead of an error or of nothing. The header is `x-finwhale-note` in every protocol,
whole and streamed. It refuses length and bytes: a note may quote a name that came from outside,
so what is sent is printable ASCII of bounded length. A newcomer's mistake: logging the note as it
is; names of tools are a user's words, and no log line has those.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from finwhale.telemetry import get_logger

logger = get_logger("serve")

NOTE_HEADER = "x-finwhale-note"
MAX_NOTE = 512
_SHOWN_NAMES = 8


def left_out(what: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the note that `names` were left out, none without names."""
    distinct = list(dict.fromkeys(name[:48] or "(no name)" for name in names))
    if not distinct:
        return ()
    more = f" and {len(distinct) - _SHOWN_NAMES} more" if len(distinct) > _SHOWN_NAMES else ""
    return (f"{what} left out: {', '.join(distinct[:_SHOWN_NAMES])}{more}",)


def note_headers(notes: Iterable[str], request_id: str) -> dict[str, str]:
    """Return the header of these notes, none without notes; log once that there are some."""
    told = list(dict.fromkeys(notes))
    if not told:
        return {}
    kinds = [note.partition(":")[0] for note in told]
    logger.info("note %s", json.dumps({"request_id": request_id, "notes": kinds}))
    # A header's value ends with no blank.
    text = "; ".join(told).strip()
    printable = "".join(c if " " <= c <= "~" else "?" for c in text[: MAX_NOTE + 1])
    return {NOTE_HEADER: printable if len(printable) <= MAX_NOTE else printable[:509] + "..."}
