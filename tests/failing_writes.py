"""Every writer of the package under a limit on file sizes, as a disk that ends after its check.

Run as `python -m tests.failing_writes WRITER FOLDER`: writes once without a limit, then again at
sizes below the largest file, and prints what happened at each size as one JSON list. The limit is
of this process alone; the signal that comes with it is ignored, as Python does by itself.
"""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from finwhale.cache.state_file import write_state
from finwhale.checkpoint import save_checkpoint
from finwhale.checkpoint.tiny import write_tiny
from finwhale.checkpoint.toy_tokenizer import toy_tokenizer_json
from finwhale.config.presets import unit, with_compressed_vocab
from finwhale.data.shards import write_shards
from finwhale.model import Backbone
from finwhale.ops import FAST
from finwhale.optim.optimizers import Optimizers
from finwhale.text.tokenizer import Tokenizer
from finwhale.text.train_tokenizer import train_tokenizer
from finwhale.train.record import Metrics, write_json
from finwhale.train.state import save_state

TEXT = "the quick brown fox jumps over the lazy dog 0123456789 " * 40


def _model() -> Backbone:
    model = Backbone(with_compressed_vocab(unit(), 512), ops=FAST)
    model.init_weights(0)
    return model


def _state(folder: Path, turn: int) -> None:
    model = _model()
    save_state(
        folder, model, Optimizers(model, scheme="adamw"), step=turn, metrics_bytes=0, elapsed_s=1.0
    )


def _checkpoint(folder: Path, turn: int) -> None:
    model = _model()
    with torch.no_grad():
        model.embed.weight += turn
    tokenizer = folder.parent / "tokenizer.json"
    if not tokenizer.exists():
        tokenizer.write_text(toy_tokenizer_json(512))
    save_checkpoint(model, folder / "out", tokenizer_file=tokenizer, overwrite=True)


def _tiny(folder: Path, turn: int) -> None:
    write_tiny(unit(), folder / "out", seed=turn, prompt_tokens=4, overwrite=True)


def _sequence_state(folder: Path, turn: int) -> None:
    write_state(folder / "state", bytes([turn]) * 30_000)


def _tokenizer(folder: Path, turn: int) -> None:
    train_tokenizer([TEXT * (1 + turn)], 300 + turn, folder / "tokenizer.json")


def _run_record(folder: Path, turn: int) -> None:
    write_json(folder / "run.json", {"turn": turn, "text": "x" * 20_000})


def _metrics(folder: Path, turn: int) -> None:
    metrics = Metrics(folder, 0)
    try:
        for step in range(500):
            metrics.write({"step": step, "turn": turn})
    finally:
        metrics.close()


def _shards(folder: Path, turn: int) -> None:
    tokenizer = folder.parent / "shards_tokenizer.json"
    if not tokenizer.exists():
        train_tokenizer([TEXT], 300, tokenizer)
    corpus = folder.parent / "corpus"
    if not corpus.exists():
        entry = {"record": {"name": "a"}, "sides": {}}
        for side in ("train", "validation"):
            (corpus / side).mkdir(parents=True)
            row = json.dumps({"name": "n", "package": "a", "text": TEXT * 20})
            (corpus / side / "a.jsonl").write_text(row + "\n")
            entry["sides"][side] = {"documents": 1}
        record = {"format": 1, "digest": "d", "sources": [entry]}
        (corpus / "corpus.json").write_text(json.dumps(record))
    write_shards(corpus, Tokenizer.from_file(tokenizer), folder / f"out{turn}", 32)


WRITERS: dict[str, Callable[[Path, int], None]] = {
    "state": _state,
    "checkpoint": _checkpoint,
    "tiny": _tiny,
    "sequence_state": _sequence_state,
    "tokenizer": _tokenizer,
    "run_record": _run_record,
    "metrics": _metrics,
    "shards": _shards,
}


def contents(folder: Path) -> dict[str, str]:
    """Return the digest of every file below `folder`, hidden ones too."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def main() -> None:
    """Write, then fail to write, at sizes from nothing to a byte below the largest file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    write, folder = WRITERS[sys.argv[1]], Path(sys.argv[2]) / "folder"
    folder.mkdir()
    write(folder, 0)
    largest = max(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    before, found = contents(folder), []
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (0, 1, 100, largest // 3, largest - 2000, largest - 1):
        if size < 0:
            continue
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            write(folder, 1)
            error = None
        except Exception as raised:
            error = [type(raised).__module__, str(raised)]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        after = contents(folder)
        names = sorted(path.name for path in folder.rglob("*"))
        found.append({"size": size, "error": error, "same": after == before, "names": names})
    shutil.rmtree(folder / "out1", ignore_errors=True)
    write(folder, 1)
    found.append({"size": None, "error": None, "same": contents(folder) == before, "names": []})
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
