"""What bounded replay (A01) changes, by prompt length: logits after the prompt and while decoding.

    python bench/bounded_replay.py --model DIR --text FILE [--lengths 16 32 64 128 256]
Compares bounded with full prefill on the same text: KL divergence and first-choice agreement at the
last prompt token and over the next 32 tokens of the text. Without --model: the demo's checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from record import write_result

from finwhale.cache.sequence_state import fresh_state
from finwhale.checkpoint.load import load_model
from finwhale.engine.prefill import Prefill
from finwhale.engine.step import forward_step
from finwhale.ops import FAST
from finwhale.text.tokenizer import Tokenizer

AFTER = 32


@torch.no_grad()
def log_probabilities(model, ids, length, mode):
    """Return log p [1 + AFTER, V] at the last prompt token and the tokens that follow."""
    state = fresh_state(model)
    prefill = Prefill(model, state, mode=mode)
    prefill.feed(ids[:, :length])
    rows = [model.logits(prefill.finish())]
    rows.append(model.logits(forward_step(model, state, ids[:, length : length + AFTER]))[0])
    return torch.cat(rows).log_softmax(-1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("runs/demo/checkpoint"))
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__))
    parser.add_argument("--lengths", type=int, nargs="*", default=[16, 32, 33, 64, 128, 256, 512])
    args = parser.parse_args()
    if not args.model.is_dir():
        print(f"{args.model}: no checkpoint; run make demo first, or name one with --model")
        return 0
    torch.set_num_threads(1)
    model = load_model(args.model, ops=FAST).model
    tokenizer = Tokenizer.from_file(args.model)
    ids = tokenizer.encode(args.text.read_text(encoding="utf-8"))
    window = model.config.text_config.sliding_window
    starts = range(0, 8 * 600, 600)
    print(f"window {window}; {len(starts)} pieces of {args.text.name} per length")
    print("prompt   KL last token   KL next 32   same first choice   layer-tokens saved")
    table = []
    for length in args.lengths:
        kls, after, same = [], [], []
        for start in starts:
            piece = torch.tensor([ids[start : start + length + AFTER]])
            full, bounded = (
                log_probabilities(model, piece, length, mode) for mode in ("full", "bounded")
            )
            kl = (full.exp() * (full - bounded)).sum(-1).clamp_min(0)
            kls.append(kl[0])
            after.append(kl[1:].mean())
            same.append((full.argmax(-1) == bounded.argmax(-1)).float().mean())
        decoder = sum(spec.half.value == "decoder" for spec in model.specs)
        saved = decoder * max(0, length - window) / (len(model.specs) * length)
        row = {
            "prompt_tokens": length,
            "kl_last_token": round(float(torch.stack(kls).mean()), 6),
            "kl_next_32": round(float(torch.stack(after).mean()), 6),
            "same_first_choice": round(float(torch.stack(same).mean()), 4),
            "layer_tokens_saved": round(saved, 4),
        }
        table.append(row)
        print(
            f"{length:6}   {row['kl_last_token']:13.6f}   {row['kl_next_32']:10.6f}   "
            f"{row['same_first_choice']:17.1%}   {saved:18.1%}"
        )
    result = {"model": "demo", "window": window, "lengths": table}
    print("written to", write_result("bounded_replay", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
