"""`finwhale evaluate`: position bits and recall grids of a checkpoint, into a report folder.

Owns the arguments and their order of refusal; rooms are imported when the command runs, so that
`finwhale --help` waits for none of them. The easy mistake: evaluating a model on the text it was
trained on; the sides of the shards are `validation` and `evaluation`, and nothing else is read.
Source: spec/training.md II.4.4.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    import numpy as np

    from finwhale.evals.position_bits import BucketBits
    from finwhale.evals.recall_grid import RecallGrid
    from finwhale.model import Backbone
    from finwhale.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Measure a checkpoint over distance: bits by position of held-out text, and recall grids.

    Without --positions and --recall both are measured. Writes evaluation.jsonl and PNG plots.

    Example: finwhale evaluate --model runs/a/checkpoint --shards runs/shards --out runs/a/evals
    """

    model: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Checkpoint folder with config.json and weights."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Folder for the report."""
    shards: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Tokenised corpus; needed for --positions and --text-filler."""
    tokenizer: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """The tokenizer.json of the shards; by default the one in the checkpoint folder."""
    side: Literal["validation", "evaluation"] = "validation"
    """Side of the shards that is read."""
    positions: bool = False
    """Measure bits per byte by position, for each source and for all of them."""
    sequence_length: Annotated[int, tyro.conf.arg(metavar="N")] = 4096
    """Tokens read of each document at most."""
    min_tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Leave shorter documents out: then all buckets up to N hold the same documents."""
    recall: bool = False
    """Measure recall by depth and length, for both tasks."""
    lengths: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N ...")] = (256, 512, 1024, 2048)
    """Row lengths of the grids."""
    depths: Annotated[tuple[float, ...], tyro.conf.arg(metavar="X ...")] = (0, 0.25, 0.5, 0.75, 1)
    """Places of the fact, 0 first and 1 beside the question."""
    examples: Annotated[int, tyro.conf.arg(metavar="N")] = 32
    """Examples of each cell."""
    text_filler: bool = False
    """Fill rows with text of the shards instead of the task's own filler ids."""
    trained_length: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Row length of the training, for a line in the plots."""
    batch_tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 4096
    """Tokens of one forward pass."""
    cache: Literal["rounded", "exact"] = "rounded"
    """rounded: cached rows as deployed. exact: as in a run without quantization."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cpu: fp32. cuda: bf16 activations, fp32 weights."""
    debug: bool = False
    """Show the traceback of an error, and how long the command took."""

    def run(self) -> int:
        """Load, measure, write and print where the report is."""
        self._check()
        from rich.console import Console

        from finwhale.evals.figures import provenance, write_report
        from finwhale.evals.recall_grid import selection_limits

        console = Console()
        both = not (self.positions or self.recall)
        shown = f"resolved: model {self.model}, device {self.device}, out {self.out}"
        console.print(shown, highlight=False, markup=False, soft_wrap=True)
        texts = self._texts(both)
        model = self._loaded()
        positions: dict[str, list[BucketBits]] = {}
        grids: list[RecallGrid] = []
        if self.positions or both:
            positions = self._positions(model, texts)
        if self.recall or both:
            grids = self._grids(model, texts)
        command = " ".join(["finwhale", *sys.argv[1:]])
        about = provenance(self.model, model.config, command=command, device=self.device)
        files = write_report(
            self.out,
            about={**about, "cache": self.cache, "side": self.side},
            positions=positions,
            grids=grids,
            trained_length=self.trained_length,
            limits=selection_limits(model),
        )
        for line in (*summary(positions, grids), *(f"wrote {file}" for file in files)):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        return 0

    def _check(self) -> None:
        """Refuse what can be refused before anything is read."""
        for name, got in (
            ("sequence-length", self.sequence_length),
            ("examples", self.examples),
            ("batch-tokens", self.batch_tokens),
        ):
            if got < 1:
                raise ValueError(f"--{name}: got {got}, expected at least 1")
        wants_text = self.positions or not self.recall or self.text_filler
        if wants_text and self.shards is None:
            raise ValueError("--shards: got nothing; give it, or --recall without --text-filler")
        if (self.out / "evaluation.jsonl").exists():
            raise ValueError(f"--out: {self.out} holds a report; choose another folder")

    def _texts(self, both: bool) -> dict[str, list[np.ndarray]]:
        """Return the documents by source, most tokens first; none where no text is read."""
        if self.shards is None or not (self.positions or both or self.text_filler):
            return {}
        from finwhale.data.shards import read_shards
        from finwhale.evals.position_bits import EvaluationError

        shards = read_shards(self.shards, self.side, tokenizer=self._tokenizer())
        sources = {}
        for source in sorted(shards.sources, key=lambda source: -source.tokens):
            kept = [d for d in shards.documents(source.name) if len(d) >= self.min_tokens]
            if kept:
                sources[source.name] = kept
        if not sources:
            want = f"at most the tokens of the longest document of {self.side}"
            raise EvaluationError(f"--min-tokens: got {self.min_tokens}, expected {want}")
        return sources

    def _tokenizer(self) -> Tokenizer:
        from finwhale.text.tokenizer import Tokenizer

        return Tokenizer.from_file(self.tokenizer or self.model)

    def _loaded(self) -> Backbone:
        """Return the model on its device, as validation in training runs it."""
        import torch

        from finwhale.checkpoint.load import load_model
        from finwhale.evals.position_bits import EvaluationError
        from finwhale.kernels.select import training_ops, training_unsupported
        from finwhale.model import Numerics

        ops = training_ops(self.device)
        numerics = Numerics(
            cache_rounding=self.cache == "rounded",
            dtype=torch.float32 if self.device == "cpu" else torch.bfloat16,
            weight_dtype=torch.float32,
        )
        model = load_model(self.model, ops=ops, numerics=numerics).model
        if self.device == "cpu":
            return model
        longest = max(self.sequence_length, *self.lengths)
        reason = training_unsupported(model.config.text_config, longest)
        if reason is not None:
            raise EvaluationError(f"device=cuda: {reason}; use --device cpu")
        model.to_device(self.device)
        model.stack_experts()
        return model

    def _positions(
        self, model: Backbone, texts: dict[str, list[np.ndarray]]
    ) -> dict[str, list[BucketBits]]:
        """Return the buckets of every source, and of all documents together under "all"."""
        from finwhale.evals.position_bits import added, position_bits, token_bytes

        tokenizer = self._tokenizer()
        num_bytes = token_bytes(tokenizer)
        found = {
            name: position_bits(
                model,
                documents,
                num_bytes=num_bytes,
                sequence_length=self.sequence_length,
                batch_rows=max(1, self.batch_tokens // self.sequence_length),
                pad_id=tokenizer.pad_id,
            )
            for name, documents in texts.items()
        }
        return {"all": added(list(found.values())), **found}

    def _grids(self, model: Backbone, texts: dict[str, list[np.ndarray]]) -> list[RecallGrid]:
        """Return one grid of each kind, over the ids and with the begin marker of the training."""
        import numpy as np

        from finwhale.evals.recall_grid import KINDS, recall_grid

        vocab, bos_id, haystack = None, None, None
        # A run of one task has no tokenizer: its ids are all free, and nothing begins a document.
        if self.tokenizer is not None or (self.model / "tokenizer.json").exists():
            from finwhale.text.train_tokenizer import NUM_FIRST_MARKERS

            vocab = range(NUM_FIRST_MARKERS, model.config.text_config.vocab_size - 1)
            bos_id = self._tokenizer().bos_id
        if self.text_filler:
            # The documents' own markers begin and end nothing here.
            haystack = np.concatenate([d[1:-1] for own in texts.values() for d in own])
        return [
            recall_grid(
                model,
                kind=kind,
                lengths=self.lengths,
                depths=self.depths,
                num_examples=self.examples,
                vocab=vocab,
                bos_id=bos_id,
                haystack=haystack,
                batch_tokens=self.batch_tokens,
            )
            for kind in KINDS
        ]


def summary(positions: dict[str, list[BucketBits]], grids: list[RecallGrid]) -> list[str]:
    """Return one line for each bucket of all text and for each length of each grid."""
    lines = []
    for bucket in positions.get("all", []):
        bits = bucket.bits_per_byte
        shown = "no text" if bits is None else f"{bits:.4f} bits per byte"
        lines.append(f"position {bucket.label}: {shown}, {bucket.num_targets:,} tokens")
    for grid in grids:
        for length in grid.lengths:
            shares = (f"{grid.cell(length, depth).accuracy:.2f}" for depth in grid.depths)
            lines.append(f"{grid.kind}, {length:,} tokens, by depth: {' '.join(shares)}")
    return lines
