"""Long documents of the evaluation tier, for the metrics of finwhale-mini: DATA/long.npz.

    finwhale corpus --tiers B --cache CACHE --out data/corpus-b
    finwhale shards --corpus data/corpus-b --tokenizer data/tokenizer.json --out data/shards-b
    python bench/mini_long_documents.py --shards data/shards-b --tokenizer data/tokenizer.json \\
        --out data/long.npz
The documents of at least 50,000 tokens in the corpus' order, cut to 65,537; no side trains on them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from finwhale.data.shards import read_shards
from finwhale.text.tokenizer import Tokenizer

MIN_TOKENS, MAX_TOKENS = 50_000, 65_537


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("data/long.npz"))
    args = parser.parse_args()
    shards = read_shards(args.shards, "evaluation", tokenizer=Tokenizer.from_file(args.tokenizer))
    starts = np.cumsum(shards.lengths) - shards.lengths
    long = [
        shards.ids[start : start + min(length, MAX_TOKENS)]
        for start, length in zip(starts.tolist(), shards.lengths.tolist(), strict=True)
        if length >= MIN_TOKENS
    ]
    lengths = [len(document) for document in long]
    np.savez_compressed(args.out, ids=np.concatenate(long), lengths=np.array(lengths))
    print(f"{args.out}: {len(long)} documents, {sum(lengths):,} tokens")


if __name__ == "__main__":
    main()
