"""What storing finwhale-mini in FP8 and FP4 costs, on held-out text: loss, first choices, replies.

    python bench/mini_export.py models/finwhale-mini runs/mini/chat/checkpoint-bf16 --data data
Compares the quantised export with the BF16 export of the same training weights, both in fp32 and
`dequant` mode, with the deployed cache rounding and without. Rows come from packages that no side
trains on. Each part leaves one JSON line.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
from record import write_result
from torch import Tensor

from finwhale.checkpoint.load import load_model
from finwhale.data.packing import PackedRows, pack
from finwhale.data.shards import read_shards
from finwhale.engine.generate import generate
from finwhale.evals.figures import folder_digest
from finwhale.evals.position_bits import forward_passes
from finwhale.model import Backbone, Numerics
from finwhale.ops import FAST
from finwhale.ops.head_loss import NO_TARGET
from finwhale.text.prompt import encode_prompt
from finwhale.text.tokenizer import Tokenizer

HELD_OUT = ("postgresql-doc", "sphinx")
PROMPT_TOKENS = 192
NEW_TOKENS = 64
# Tokens whose logits exist at one time.
CHUNK = 512
QUESTIONS = (
    "What is 17 + 25?",
    "Say the word garden backwards.",
    "Write a short sentence about the sea.",
    "Which of these numbers is the largest: 31, 13, 103?",
    "Sort these words: pear, apple, fig.",
    "What does the command ls do?",
    "Explain in one sentence what a database index is.",
    "Repeat after me: the quick brown fox.",
)


def spread_rows(documents: list[np.ndarray], count: int, length: int, pad_id: int) -> PackedRows:
    """Return `count` rows of `length` at equal distances; packing puts the longest pieces first."""
    packed = pack([d.tolist() for d in documents], sequence_length=length, pad_id=pad_id)
    rows = np.unique(np.linspace(0, packed.num_rows - 1, count).round().astype(int))
    lengths = tuple(packed.lengths[row] for row in rows)
    return PackedRows(inputs=packed.inputs[rows], targets=packed.targets[rows], lengths=lengths)


def log_probabilities(model: Backbone, hidden: Tensor) -> Tensor:
    """Return log p [n, V] fp32 of hidden rows [n, C]."""
    return model.logits(hidden).float().log_softmax(-1)


def teacher_forced(quantised: Backbone, exact: Backbone, rows: PackedRows) -> dict:
    """Return mean losses, their ratio, KL divergence and the share of equal first choices."""
    nats = np.zeros(2)
    divergence = 0.0
    equal = total = 0
    passes = [forward_passes(model, rows, batch_rows=2) for model in (quantised, exact)]
    differences = []
    for (_, batch, first), (_, _, second) in zip(*passes, strict=True):
        has_target = batch.targets != NO_TARGET
        wanted = batch.targets[has_target]  # [n]
        pair = (first[has_target], second[has_target])
        for part in range(0, len(wanted), CHUNK):
            stop = part + CHUNK
            ours, theirs = (
                log_probabilities(model, hidden[part:stop])
                for model, hidden in zip((quantised, exact), pair, strict=True)
            )
            targets = wanted[part:stop].long()[:, None]
            losses = [-values.gather(1, targets)[:, 0].double() for values in (ours, theirs)]
            differences.append((losses[0] - losses[1]).numpy())
            nats += [float(values.sum()) for values in losses]
            divergence += float((theirs.exp() * (theirs - ours)).sum())
            equal += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            total += len(targets)
    change = np.concatenate(differences)
    means = nats / total
    return {
        "targets": total,
        "loss_quantised": round(means[0], 5),
        "loss_bf16": round(means[1], 5),
        "ratio": round(means[0] / means[1], 5),
        "standard_error_of_difference": round(float(change.std()) / math.sqrt(total), 5),
        "kl_bf16_to_quantised": round(divergence / total, 5),
        "top1_agreement": round(equal / total, 5),
    }


def margin(model: Backbone, ids: list[int], rival: int) -> float:
    """Return log p of the model's first choice after `ids`, less that of `rival`."""
    values = log_probabilities(model, model.hidden(torch.tensor([ids]))[0, -1:])[0]
    return round(float(values.max() - values[rival]), 4)


def reply(model: Backbone, prompt: list[int], stop_ids: tuple[int, ...]) -> list[int]:
    """Return the greedy continuation, at most NEW_TOKENS."""
    return list(generate(model, prompt, max_new_tokens=NEW_TOKENS, stop_ids=stop_ids))


def greedy_pair(quantised: Backbone, exact: Backbone, prompt: list[int], stop: tuple) -> dict:
    """Return the share of equal tokens, place of the first difference and both margins there."""
    ours, theirs = reply(quantised, prompt, stop), reply(exact, prompt, stop)
    longest = max(len(ours), len(theirs))
    same = [a == b for a, b in zip(ours, theirs, strict=False)]
    found = {"tokens": longest, "equal": sum(same), "first_difference": None}
    # Of two greedy replies one cannot be the beginning of the other: both stop at the same id.
    if not all(same):
        at = same.index(False)
        before = prompt + ours[:at]
        found |= {
            "first_difference": at,
            "margin_bf16": margin(exact, before, ours[at]),
            "margin_quantised": margin(quantised, before, theirs[at]),
        }
    return found


def summary(pairs: list[dict]) -> dict:
    """Return the figures over all prompts."""
    tokens = sum(pair["tokens"] for pair in pairs)
    parted = [pair for pair in pairs if pair["first_difference"] is not None]
    margins = [pair["margin_bf16"] for pair in parted]
    return {
        "prompts": len(pairs),
        "equal_share": round(sum(pair["equal"] for pair in pairs) / tokens, 4),
        "identical_replies": len(pairs) - len(parted),
        "median_first_difference": float(np.median([p["first_difference"] for p in parted]))
        if parted
        else None,
        "median_margin_bf16": round(float(np.median(margins)), 4) if margins else None,
        "largest_margin_bf16": max(margins, default=None),
    }


def prompts(documents: list[np.ndarray], tokenizer: Tokenizer, count: int) -> list[tuple]:
    """Return (kind, ids, stop ids): `count` pieces of held-out documents and the questions."""
    long = [d for d in documents if len(d) > PROMPT_TOKENS]
    picked = np.linspace(0, len(long) - 1, count).round().astype(int)
    text = [("text", long[place][:PROMPT_TOKENS].tolist(), ()) for place in picked]
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    chat = [
        ("chat", encode_prompt(tokenizer, messages, thinking=False), (tokenizer.eos_id,))
        for messages in asked
    ]
    return text + chat


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="the FP8 and FP4 export")
    parser.add_argument("bf16_model", type=Path, help="the same weights as BF16")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--text-prompts", type=int, default=16)
    parser.add_argument("--parts", nargs="*", default=["deployed", "greedy", "exact"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(args.model)
    shards = read_shards(args.data / "shards", "validation", tokenizer=tokenizer)
    documents = [d for name in HELD_OUT for d in shards.documents(name)]
    rows = spread_rows(documents, args.rows, args.length, tokenizer.pad_id)
    about = {
        "digest": folder_digest(args.model),
        "digest_bf16": folder_digest(args.bf16_model),
        "packages": list(HELD_OUT),
        "numerics": "fp32, dequant",
    }
    for part in args.parts:
        rounding = part != "exact"
        numerics = Numerics(cache_rounding=rounding)
        quantised, exact = (
            load_model(folder, numerics=numerics, ops=FAST).model
            for folder in (args.model, args.bf16_model)
        )
        began = time.time()
        result = {"part": part, "cache_rounding": rounding, **about}
        if part == "greedy":
            pairs = []
            for kind, ids, stop in prompts(documents, tokenizer, args.text_prompts):
                pairs.append({"kind": kind, **greedy_pair(quantised, exact, ids, stop)})
                print(pairs[-1], flush=True)
            result["all"] = summary(pairs)
            for kind in ("text", "chat"):
                result[kind] = summary([pair for pair in pairs if pair["kind"] == kind])
            result["pairs"] = pairs
        else:
            result |= {"rows": rows.num_rows, "row_tokens": args.length}
            result |= teacher_forced(quantised, exact, rows)
        result["seconds"] = round(time.time() - began, 1)
        print({k: v for k, v in result.items() if k != "pairs"}, flush=True)
        write_result("mini_export", result)
    return 0


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
