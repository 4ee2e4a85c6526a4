"""Resuming a very long text from disk through the engine: exact and bounded beside the cold start.

    python bench/replay_longest.py --corpus data/corpus --length 65536
`replay_table.py` reads its texts by the slow definition, an hour for 65,536 tokens. Here the
engine reads pages of the corpus in a row and stores their blocks, once for each recovery, as every
mode has blocks of its own; then a new engine opens the store, resumes the prompt and replies
greedily with 16 tokens. Kept (bench/results/replay_longest.jsonl): tokens found and replayed, how
many of the first 1 and 16 tokens are those of the exact cold start, and a lower bound of
KL(cold || resumed) behind the prompt: over the 20 best tokens of both and one bin for all others.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path

import torch
from disk_cache import open_tier_in
from record import write_result
from replay_table import SUFFIX, Texts

from finwhale.checkpoint.load import load_model
from finwhale.config.engine import EngineConfig
from finwhale.engine import Engine, SamplingParams
from finwhale.evals.figures import folder_digest
from finwhale.ops import FAST
from finwhale.text.tokenizer import Tokenizer

REPLY = 16
BEST = 20
RECOVERIES = {
    "exact": {"prefill": "exact"},
    "both, one window": {"prefill": "bounded", "replay_windows": 1},
    "both, two windows": {"prefill": "bounded", "replay_windows": 2},
}


def binned_kl(cold, resumed) -> float:
    """Return KL over the tokens that both name and one bin for the rest: at most the true KL."""
    q_of = dict(resumed.top)
    named = [(p, q_of[token]) for token, p in cold.top if token in q_of]
    kl = sum(math.exp(p) * (p - q) for p, q in named)
    p_rest = 1 - sum(math.exp(p) for p, _ in named)
    q_rest = 1 - sum(math.exp(q) for _, q in named)
    if p_rest > 0 and q_rest > 0:
        kl += p_rest * math.log(p_rest / q_rest)
    return max(0.0, kl)


def reply(model, prompt: list[int], directory: Path, settings: dict):
    """Return the tokens of a reply, engine statistics and seconds."""
    config = EngineConfig(num_blocks=len(prompt) // 64 + 8, max_sequences=1, **settings)
    engine = Engine(model, config, open_tier=open_tier_in(directory))
    params = SamplingParams(max_new_tokens=REPLY, temperature=0.0, logprobs=True, top_logprobs=BEST)
    began = time.time()
    ((results,),) = engine.generate([prompt], params)
    took, stats = time.time() - began, engine.scheduler.stats
    engine.close()
    return results, stats, took


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=Path("models/finwhale-mini"))
    parser.add_argument("--corpus", type=Path, default=Path("data/corpus"))
    parser.add_argument("--length", type=int, default=65_536, help="a multiple of 64")
    parser.add_argument("--documents", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(args.model, ops=FAST).model
    texts = Texts(args.corpus, Tokenizer.from_file(args.model))
    for number in range(args.documents):
        prompt = texts.joined(number, args.length + SUFFIX, "cpu")[0].tolist()
        with tempfile.TemporaryDirectory() as folder:
            cold = None
            for name, settings in RECOVERIES.items():
                # The first recovery, exact, makes the reference as it stores its blocks.
                first = prompt if cold is None else prompt[: args.length]
                read, _, took = reply(model, first, Path(folder), settings)
                cold = cold or read
                print(f"document {number}, {name}: cold {took:.0f} s", flush=True)
                again, stats, took = reply(model, prompt, Path(folder), settings)
                same = [a.token == b.token for a, b in zip(cold, again, strict=True)]
                row = {
                    "document": number,
                    "tokens": len(prompt),
                    "digest": folder_digest(args.model),
                    "recovery": name,
                    "found": stats.loaded_tokens,
                    "replayed": stats.replayed_tokens,
                    "kl_1_at_least": float(f"{binned_kl(cold[0], again[0]):.3g}"),
                    "same_first": same[0],
                    "same_16": sum(same),
                    "seconds": round(took, 1),
                }
                print(row, flush=True)
                write_result("replay_longest", row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
