"""Which rows of a step each layer runs on: those whose output something later still reads.

A row that is run again for the windows it leaves is needed less and less from layer to layer: the
windows above reach back W - 1 rows per layer that is left. So the oldest rows leave one layer after
the other, and in the layer where a row leaves only its window row is made: no query, no selection,
no experts. Values do not change, since no row that stays can see one that has left. A newcomer's
mistake: to count from the first row of a replay; what is needed is counted back from the first
position at which all windows of a half have to be whole.
Source: spec/backbone.md section 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from finwhale.engine.paged_pass import RowSpan


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one sequence does in a step.

    span           its encoder rows
    decoder_start  first position that the decoder runs on
    decoder_floor  first position whose decoder window row exists
    first_logits   rows from this position on need logits
    encoder_whole  first position with whole windows below it in every encoder layer, and the first
                   whose encoder output is read; None: no encoder row may be left out
    decoder_whole  first position with whole windows below it in every decoder layer; None: every
                   layer runs on all decoder rows, and all of them may have logits
    """

    span: RowSpan
    decoder_start: int
    decoder_floor: int
    first_logits: int
    encoder_whole: int | None = None
    decoder_whole: int | None = None

    def decoder_span(self) -> RowSpan:
        """Return the rows that the decoder runs on at most, perhaps none."""
        start = min(max(self.span.start, self.decoder_start), self.span.stop)
        return replace(self.span, start=start, window_floor=self.decoder_floor)

    def encoder_starts(self, layers: int, window: int) -> list[int]:
        """Return the first row into each encoder layer, then the first out of the last."""
        return _starts(self.span, self.encoder_whole, layers, window)

    def decoder_starts(self, layers: int, window: int) -> list[int]:
        """Return the first row into each decoder layer, then the first out of the last."""
        span = self.decoder_span()
        starts = _starts(span, self.decoder_whole, layers, window)
        if self.decoder_whole is not None:
            starts[-1] = min(span.stop, max(starts[-2], self.first_logits))
        return starts


def _starts(span: RowSpan, whole: int | None, layers: int, window: int) -> list[int]:
    if whole is None:
        return [span.start] * (layers + 1)
    reach = window - 1
    return [min(span.stop, max(span.start, whole - n * reach)) for n in range(layers, -1, -1)]
