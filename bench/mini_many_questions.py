"""Recall in rows of many facts that are all asked for: many answers from few long passes.

    python bench/mini_many_questions.py --lengths 65536 --documents 2 --out runs/many.jsonl
The grid of `mini_evals.py` asks one question a row, so its cells are independent and a row of
65,536 tokens yields one answer. Here each row holds `--facts` facts at random places and asks for
every one, as the task `needles` of the training does, and `associative_recall` with scattered
pairs. A line per kind and length counts the right answers by the fifth of the row that the fact
lies in. On a CPU the engine reads the document once and each question is a request of its own that
finds it in the prefix cache; on a GPU one forward pass reads all questions, answers included.
Answers about one document are not independent of each other.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from rich.progress import track

from finwhale.checkpoint.load import load_model
from finwhale.config.engine import EngineConfig
from finwhale.data.long_tasks import alphabet, task_example
from finwhale.data.packing import NO_TARGET, PackedRows
from finwhale.engine import Engine, SamplingParams
from finwhale.evals.figures import provenance
from finwhale.evals.position_bits import forward_passes
from finwhale.kernels.select import training_ops
from finwhale.model import Numerics
from finwhale.ops import FAST
from finwhale.text.tokenizer import Tokenizer
from finwhale.text.train_tokenizer import NUM_FIRST_MARKERS

FIFTHS = 5


def rows(kind: str, length: int, count: int, facts: int, vocab: range, bos_id: int) -> PackedRows:
    """Return `count` rows of one document each that asks for all its facts."""
    options = {
        "needles": {"num_facts": facts, "num_values": 1},
        "associative_recall": {"num_pairs": facts, "num_queries": facts, "scattered": 1},
    }[kind]
    inputs, targets = [], []
    for index in range(count):
        example = task_example(kind, seed=78, index=index, length=length, vocab=vocab, **options)
        ids = np.array([bos_id, *example.tokens], dtype=np.int32)
        is_answer = np.array(example.answer_mask)
        inputs.append(ids[:-1])
        targets.append(np.where(is_answer, ids[1:], NO_TARGET).astype(np.int32))
    return PackedRows(
        inputs=np.stack(inputs), targets=np.stack(targets), lengths=((length,),) * count
    )


def places(ids: np.ndarray, targets: np.ndarray, query: int) -> np.ndarray:
    """Return, for each answer of a row in order, where in the row its fact's value stands."""
    asked = np.flatnonzero(targets != NO_TARGET)
    first = int(np.flatnonzero(ids == query)[0])
    found = []
    for at in asked:
        key, value = int(ids[at]), int(targets[at])
        pair = (ids[: first - 1] == key) & (ids[1:first] == value)
        (where,) = np.flatnonzero(pair)
        found.append(where + 1)
    return np.array(found)


def by_fifth(model, packed: PackedRows, query: int) -> list[tuple[int, int]]:
    """Return (right, asked) for each fifth of the rows, first to last."""
    right, asked = np.zeros(FIFTHS, dtype=int), np.zeros(FIFTHS, dtype=int)
    length = packed.inputs.shape[1]
    for numbers, batch, hidden in forward_passes(model, packed, batch_rows=1):
        targets = packed.targets[numbers[0]]
        at = torch.from_numpy(np.flatnonzero(targets != NO_TARGET)).to(hidden.device)
        best = model.logits(hidden[0, at]).argmax(-1).cpu().numpy()
        del hidden, batch
        is_right = best == targets[targets != NO_TARGET]
        fifth = places(packed.inputs[numbers[0]], targets, query) * FIFTHS // length
        np.add.at(asked, fifth, 1)
        np.add.at(right, fifth, is_right)
    return list(zip(right.tolist(), asked.tolist(), strict=True))


def by_fifth_asked(model, packed: PackedRows, query: int) -> list[tuple[int, int]]:
    """Return what `by_fifth` does, each question asked alone behind the document (engine)."""
    right, asked = np.zeros(FIFTHS, dtype=int), np.zeros(FIFTHS, dtype=int)
    length = packed.inputs.shape[1]
    engine = Engine(model, EngineConfig(num_blocks=length // 64 + 8, max_sequences=1))
    one = SamplingParams(max_new_tokens=1, temperature=0.0)
    for ids, targets in zip(packed.inputs, packed.targets, strict=True):
        body = ids[: int(np.flatnonzero(ids == query)[0])].tolist()
        where = places(ids, targets, query) * FIFTHS // length
        answers = np.flatnonzero(targets != NO_TARGET)
        for n in track(range(len(answers)), description=f"{length:,} tokens"):
            at = int(answers[n])
            prompt = [*body, query, int(ids[at])]
            (found,) = engine.generate([prompt], one)
            asked[where[n]] += 1
            right[where[n]] += found[0][0].token == int(targets[at])
    return list(zip(right.tolist(), asked.tolist(), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, default=Path("models/finwhale-mini"))
    parser.add_argument("--lengths", nargs="*", type=int, default=[16_384, 65_536])
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--facts", type=int, default=32)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    is_cuda = args.device == "cuda"
    dtype = torch.bfloat16 if is_cuda else torch.float32
    numerics = Numerics(cache_rounding=True, dtype=dtype, weight_dtype=torch.float32)
    ops = training_ops(args.device) if is_cuda else FAST
    model = load_model(args.model, ops=ops, numerics=numerics).model
    model.to_device(args.device)
    if is_cuda:
        model.stack_experts()
    tokenizer = Tokenizer.from_file(args.model / "tokenizer.json")
    vocab = range(NUM_FIRST_MARKERS, model.config.text_config.vocab_size - 1)
    about = provenance(args.model, model.config, command=" ".join(sys.argv), device=args.device) | {
        "model": args.model.name
    }
    for length in args.lengths:
        for kind in ("associative_recall", "needles"):
            began = time.time()
            packed = rows(kind, length, args.documents, args.facts, vocab, tokenizer.bos_id)
            measure = by_fifth if is_cuda else by_fifth_asked
            cells = measure(model, packed, alphabet(vocab).query)
            line = {"kind": kind, "length": length, "facts": args.facts, "fifths": cells}
            line["seconds"] = round(time.time() - began, 1)
            print(json.dumps(line), flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps({**line, **about}) + "\n")
    return 0


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
