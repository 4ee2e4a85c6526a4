"""One choice of a request on its way through the engine: its tokens, and where its memory is.

| field           | meaning                                                                  |
|-----------------|--------------------------------------------------------------------------|
| `num_computed`  | tokens whose encoder rows ran in this residence; the next pass starts here |
| `stored`        | tokens whose global KV exists; a pass writes nothing below               |
| `encoder_floor` | first position whose encoder window row exists                           |
| `decoder_start` | first position that the decoder runs on                                  |
| `decoder_floor` | first position whose decoder window row exists                           |
| `encoder_whole` | as in `live_rows.Work`, of the encoder; None: all its rows run            |
| `decoder_whole` | the same of the decoder                                                  |
| `exact_from`    | from this length on all windows are exact, so they may be shared         |

A residence is the time between admission and preemption or the end; after a preemption the sequence
starts again from its tokens. A newcomer's mistake: the last token of a decoding sequence has been
drawn but not computed, so `num_computed` is one behind.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from finwhale.engine.hand_over import HandOver
from finwhale.engine.request import Constraint, SamplingParams, TokenResult


@dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """See the table above. `blocks` and `keys` are the block table and the keys of cached blocks.

    tokens      prompt and new tokens
    slot        of its rings and open groups; -1 while it waits
    arrival     order of admission to the queue; older goes first
    pinned      keys that a preemption pinned in the slower tier, until it starts again
    seed        of this choice; a draw depends on it and the token's number alone
    hand_over   global KV from elsewhere, until the first residence has taken it
    num_found   blocks that this residence began with
    drawn       how often each id was drawn, kept where a penalty asks for it
    """

    request_id: str
    index: int
    params: SamplingParams
    tokens: list[int]
    num_prompt: int
    arrival: int
    seed: int
    salt: str = ""
    constraint: Constraint | None = None
    hand_over: HandOver | None = None
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    num_found: int = 0
    pinned: list[bytes] = field(default_factory=list)
    may_cache: bool = True
    root_key: bytes = b""
    num_computed: int = 0
    stored: int = 0
    encoder_floor: int = 0
    decoder_start: int = 0
    decoder_floor: int = 0
    encoder_whole: int | None = None
    decoder_whole: int | None = None
    exact_from: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    prompt_results: list[TokenResult] | None = None
    drawn: Counter[int] = field(default_factory=Counter)

    @property
    def name(self) -> tuple[str, int]:
        return self.request_id, self.index

    @property
    def is_running(self) -> bool:
        """Whether it has a slot, and so memory."""
        return self.slot >= 0

    @property
    def num_new(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def num_held(self) -> int:
        """Tokens whose blocks a start asks for: one more than there are, if one may follow."""
        return min(len(self.tokens) + 1, self.num_prompt + self.params.max_new_tokens)

    @property
    def num_left(self) -> int:
        """Tokens that wait for their pass."""
        return len(self.tokens) - self.num_computed

    @property
    def wants_prompt_results(self) -> bool:
        """Log-probabilities of the prompt were asked for and are not all there."""
        asked = self.params.prompt_logprobs is not None and self.index == 0
        return asked and self.prompt_results is None
