"""The tools that a chat of this package can really run: a calculator, some values, some files.

Owns what the tools of finwhale/conversations/tasks.py look at: a store of numbers that a chat may
change, and a few texts that nobody can. It refuses to reach anything outside itself: no call
reads a disk, a clock or a network. A newcomer's mistake: one store for everybody; each chat has
its own, since one person's numbers are nobody else's business.
Source: spec/multimodal-serving.md section B.5 for the form of a call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from finwhale.conversations.tasks import TOOLS, run_tool

# A product of long numbers costs the square of its length, so a call has a limit of its own.
MAX_ARGUMENT_LETTERS = 1000
MAX_KEYS = 100
MAX_RESULT_LETTERS = 4000

STORE: Mapping[str, int] = {"bakota": 1532, "limo": 27, "sunare": 4096}
FILES: Mapping[str, str] = {
    "docs/cache.txt": "The size of the cache is 890 bytes per token.",
    "docs/window.md": "The length of the window is 128 tokens.",
    "notes/whale.txt": "The colour of the whale is blue.",
}


class DemoTools:
    """The tools of one chat.

    store  values by key; `set_value` changes it
    """

    def __init__(self, store: Mapping[str, int] | None = None) -> None:
        """Begin with `store`, or with the one that comes along."""
        self.store = dict(STORE if store is None else store)

    @property
    def declared(self) -> list[dict[str, Any]]:
        """The tools as a request declares them."""
        return list(TOOLS.values())

    def run(self, name: str, arguments: str) -> str:
        """Return the result of a call; a failed one returns "error: ..." and changes nothing.

        arguments  JSON object, as the model wrote it
        """
        if len(arguments) > MAX_ARGUMENT_LETTERS:
            return f"error: arguments longer than {MAX_ARGUMENT_LETTERS} letters"
        try:
            values = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return "error: the arguments are not JSON"
        if not isinstance(values, dict):
            return "error: the arguments are not a JSON object"
        if name == "set_value" and len(self.store) >= MAX_KEYS:
            return f"error: the store is full, it has {MAX_KEYS} keys"
        try:
            return run_tool(name, values, store=self.store, files=FILES)[:MAX_RESULT_LETTERS]
        except (TypeError, ValueError, OverflowError) as error:
            return f"error: {error}"[:MAX_RESULT_LETTERS]
