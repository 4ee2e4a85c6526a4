"""Marker strings of the released tokenizer that this package writes or looks for.

The bar is U+FF5C and the blank inside names is U+2581; both are escaped here because neither
can be told from its ASCII look-alike on a screen. A file that was read as ASCII, or whose
escapes were left undecoded, holds other strings: `Tokenizer.bos_id` and its like refuse it.
Source: spec/multimodal-serving.md section B.1.
"""

from __future__ import annotations

_BAR = "\uff5c"
_BLANK = "\u2581"


def marker(name: str) -> str:
    """Return the released marker `<|name|>` with the full-width bar and its blanks."""
    return f"<{_BAR}{name.replace(' ', _BLANK)}{_BAR}>"


BOS = marker("begin of sentence")
EOS = marker("end of sentence")
PAD = marker(" pad ")
SYSTEM = marker("System")
USER = marker("User")
ASSISTANT = marker("Assistant")
THINK = "<think>"
END_THINK = "</think>"
DSML = f"{_BAR}DSML{_BAR}"
LATEST_REMINDER = marker("latest_reminder")
IMAGE = marker("deepseek_image")
# The release gives the draft head's noise token and the system marker one id.
NOISE = SYSTEM

CORE_MARKERS = (BOS, EOS, PAD)
CHAT_MARKERS = (
    SYSTEM,
    marker("fim hole"),
    marker("fim begin"),
    marker("fim end"),
    USER,
    ASSISTANT,
    THINK,
    END_THINK,
    DSML,
    LATEST_REMINDER,
    *(marker(task) for task in ("action", "query", "authority", "domain", "title", "read_url")),
)
GROUNDING_MARKERS = tuple(
    marker(f"{slash}{shape}") for shape in ("polygon", "point", "box", "ref") for slash in ("/", "")
)
# "Special" in the file means "hidden when special tokens are skipped"; role markers are not.
HIDDEN_MARKERS = frozenset((*CORE_MARKERS, *GROUNDING_MARKERS))
