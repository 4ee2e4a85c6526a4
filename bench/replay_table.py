"""The price of bounded replay: every boundary, replay length and recovery, cold against recovered.

    python bench/replay_table.py --model mini=models/finwhale-mini --corpus data/corpus \\
        --what text suffix facts crossings chain long --out bench/results/replay
Each unit (a document, some prompts, a chain) leaves one line in OUT/NAME.jsonl; a unit that is
there is not run again, so an interrupted program goes on. `replay_report.py` makes docs/replay.md
of the lines. Greedy tokens are the cold run's: recovered runs are fed them, one after the other.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from record import provenance

from finwhale.checkpoint.load import load_model
from finwhale.engine.invariance import engine_ops
from finwhale.engine.runner import with_ops
from finwhale.evals.figures import folder_digest
from finwhale.evals.replay_boundary import (
    EXACT,
    KEPT,
    ColdRun,
    Difference,
    Recovery,
    bounded,
    cold_run,
    compare,
    continued,
    decoder_bounded,
    encoder_bounded,
    greedy,
    hidden_behind,
    recover,
    stops_for,
)
from finwhale.evals.replay_chain import chain, uninterrupted
from finwhale.evals.replay_inputs import CROSSINGS, fact_questions
from finwhale.model import Backbone
from finwhale.ops import FAST
from finwhale.text.tokenizer import Tokenizer
from finwhale.text.train_tokenizer import NUM_FIRST_MARKERS

BOUNDARY_HITS = (0, 1, 2, 63, 64, 65, 127, 128, 129, 130, 255, 256, 257)
BOUNDARY_HITS += (1023, 1024, 1025, 4095, 4096, 4097)
SUFFIX = 8
SUFFIXES = (*range(1, 13), 127, 128, 129)
SUFFIX_HITS = (257, 1024)
# Tokens behind a hit, in stretches that double.
DISTANCES = (1, 2, 3, 5, 9, 17, 33, 65, 130)
LONG_REPLIES = (1024, 4096)
EXACT_HITS = (65, 257, 1025, 4096)
FIELD_HIT = 4096
LONG_HIT = 16_384
TURNS, TURN_TOKENS, FIRST_TURN = 200, 24, 300
COUNTS = (1, 16, 256)


def figure(value: float) -> float:
    """Return three significant digits: files stay small."""
    return float(f"{value:.3g}")


def shown(difference: Difference, **where) -> dict:
    """Return a cell: KL and agreement over the first 1, 16 and 256 tokens, as far as there are."""
    counts = [n for n in COUNTS if n <= len(difference.kl)]
    return {
        **where,
        "kl": [figure(difference.mean_kl(n)) for n in counts],
        "same": [figure(difference.agreement(n)) for n in counts],
        "run": difference.run,
    }


class Program:
    """The model at hand and what its units are made of."""

    def __init__(self, model: Backbone, tokenizer: Tokenizer, texts: Texts, device: str) -> None:
        self.model, self.tokenizer, self.texts, self.device = model, tokenizer, texts, device
        text = model.config.text_config
        self.window = text.sliding_window
        layers = len(model.specs)
        every = (self.window * k // 2 for k in (0, 1, 2, 4, 8, layers, 2 * layers))
        self.lengths = sorted(set(every))
        self.vocab = range(NUM_FIRST_MARKERS, text.vocab_size - 1)

    def recoveries(self, rows: int) -> list[Recovery]:
        return [encoder_bounded(rows), decoder_bounded(rows), bounded(rows)]

    def cell(self, cold: ColdRun, hit: int, stop: int, recovery: Recovery, tokens, reference, part):
        state, last = recover(cold, hit, stop, recovery)
        found = compare(reference, continued(self.model, state, last, tokens[:-1]))
        rows = recovery.decoder if recovery.encoder is None else recovery.encoder
        where = {"part": part, "hit": hit, "suffix": stop - hit, "mode": recovery.name}
        return shown(found, **where, rows=rows)

    def text(self, number: int) -> Iterator[dict]:
        """Yield the cells of one document: floor, boundaries, receptive field."""
        ids = self.texts.document(number, FIELD_HIT + max(SUFFIXES), self.device)
        stops = {hit + SUFFIX for hit in BOUNDARY_HITS}
        for hit in BOUNDARY_HITS:
            for recovery in self.recoveries(self.window):
                stops |= stops_for(hit, hit + SUFFIX, recovery)
        for rows in self.lengths:
            stops |= stops_for(FIELD_HIT, FIELD_HIT + SUFFIX, decoder_bounded(rows))
        cold = cold_run(self.model, ids, stops=stops)
        yield from self.floor(cold)
        yield from self.boundary(cold, number)
        yield from self.field(cold)

    def floor(self, cold: ColdRun) -> Iterator[dict]:
        other = cold_run(self.model, cold.ids, stops=[], chunk=384)
        found = compare(cold.log_probabilities(slice(None)), other.log_probabilities(slice(None)))
        kl = np.array(found.kl)
        for first in (n for n in (0, 128, 1024) if n < len(kl)):
            part = kl[first:]
            yield {
                "part": "floor",
                "from": first,
                "tokens": len(part),
                "kl": figure(float(part.mean())),
                "median": figure(float(np.median(part))),
                "p99": figure(float(np.quantile(part, 0.99))),
                "max": figure(float(part.max())),
                "same": figure(float(np.mean(found.same[first:]))),
            }

    def boundary(self, cold: ColdRun, number: int) -> Iterator[dict]:
        for hit in BOUNDARY_HITS:
            stop = hit + SUFFIX
            tokens, reference = greedy(cold, stop, 256 if hit in LONG_REPLIES else 16)
            recoveries = [KEPT, *self.recoveries(self.window), bounded(0)]
            if hit > self.window:
                recoveries.append(replace(bounded(2 * self.window), name="twice"))
            if hit in EXACT_HITS and number < 2:
                recoveries.append(EXACT)
            for recovery in recoveries:
                yield self.cell(cold, hit, stop, recovery, tokens, reference, "boundary")

    def suffix(self, number: int) -> Iterator[dict]:
        """Yield one document's cells for suffixes of many lengths."""
        longest = max(SUFFIX_HITS) + max(SUFFIXES)
        ids = self.texts.document(number, longest, self.device)
        stops: set[int] = set()
        for hit in SUFFIX_HITS:
            for n in SUFFIXES:
                stops |= stops_for(hit, hit + n, decoder_bounded(self.window))
        cold = cold_run(self.model, ids, stops=stops)
        for hit in SUFFIX_HITS:
            stop = hit + max(SUFFIXES)
            reference = cold.log_probabilities(slice(hit, stop))
            for recovery in (KEPT, encoder_bounded(self.window), encoder_bounded(0)):
                hidden = hidden_behind(cold, hit, stop, recovery)
                with torch.no_grad():
                    found = compare(reference, self.model.logits(hidden).log_softmax(-1))
                # Behind a suffix of n tokens stands row n - 1: all suffixes in one pass.
                yield {
                    "part": "behind",
                    "hit": hit,
                    "mode": recovery.name if recovery.encoder != 0 else "none",
                    "kl": {n: figure(found.kl[n - 1]) for n in SUFFIXES},
                    "from": {
                        low: figure(float(np.mean(found.kl[low - 1 : high - 1])))
                        for low, high in pairwise(DISTANCES)
                    },
                    "same": figure(float(np.mean(found.same))),
                }
            for n in SUFFIXES:
                row = reference[n - 1 : n]
                for recovery in (decoder_bounded(self.window), bounded(self.window)):
                    yield self.cell(cold, hit, hit + n, recovery, [0], row, "suffix")

    def field(self, cold: ColdRun) -> Iterator[dict]:
        stop = FIELD_HIT + SUFFIX
        tokens, reference = greedy(cold, stop, 16)
        for rows in self.lengths:
            for recovery in self.recoveries(rows):
                yield self.cell(cold, FIELD_HIT, stop, recovery, tokens, reference, "field")

    def facts(self, number: int) -> Iterator[dict]:
        """Yield the questions about four prefixes, at even and odd hits."""
        for n in range(4):
            rng = np.random.default_rng((71, number, n))
            hit = 512 + n % 2
            questions = fact_questions(
                rng, vocab=self.vocab, hit=hit, window=self.window, bos_id=self.tokenizer.bos_id
            )
            stop = len(questions[0].ids)
            recoveries = [KEPT, *self.recoveries(self.window), bounded(0)]
            shared = torch.tensor([questions[0].shared], device=self.device)
            stops = {shared.shape[1], hit, stop - self.window}
            cold = cold_run(self.model, shared, stops=stops)
            for question in questions:
                asked = cold.branch(shared.shape[1], question.tail)
                reference = asked.log_probabilities(slice(stop - 1, stop))
                right = {"cold": int(reference.argmax()) == question.answer[0]}
                kl = {}
                for recovery in recoveries:
                    state, last = recover(asked, hit, stop, recovery)
                    row = continued(self.model, state, last, [])
                    name = "none" if recovery.encoder == 0 else recovery.name
                    right[name] = int(row.argmax()) == question.answer[0]
                    kl[name] = figure(compare(reference, row).kl[0])
                yield {
                    "part": "facts",
                    "hit": hit,
                    "place": question.place,
                    "right": right,
                    "kl": kl,
                }

    def crossings(self, number: int) -> Iterator[dict]:
        """Yield copies and n-gram loops that the hit cuts; right tokens are fed."""
        for build in CROSSINGS:
            for hit in (512, 513):
                rng = np.random.default_rng((72, number, hit))
                placed = build(
                    rng, vocab=self.vocab, hit=hit, window=self.window, bos_id=self.tokenizer.bos_id
                )
                ids = torch.tensor([placed.ids], device=self.device)
                stop = ids.shape[1]
                recoveries = [KEPT, *self.recoveries(self.window), bounded(0)]
                stops = {stop}.union(*(stops_for(hit, stop, r) for r in recoveries))
                cold = cold_run(self.model, ids, stops=stops)
                fed, answer = placed.answer[:-1], torch.tensor(placed.answer)
                last = cold.hidden[stop - 1 : stop]
                reference = continued(self.model, cold.kept(stop), last, fed)
                right = {"cold": int((reference.argmax(-1).cpu() == answer).sum())}
                kl = {}
                for recovery in recoveries:
                    row = continued(self.model, *recover(cold, hit, stop, recovery), fed)
                    name = "none" if recovery.encoder == 0 else recovery.name
                    right[name] = int((row.argmax(-1).cpu() == answer).sum())
                    kl[name] = figure(compare(reference, row).mean_kl(len(row)))
                yield {
                    "part": "crossings",
                    "hit": hit,
                    "place": placed.place,
                    "tokens": len(answer),
                    "right": right,
                    "kl": kl,
                }

    def chain(self, number: int) -> Iterator[dict]:
        """Yield one chain of turns from the disk, and what one resume at the same places costs."""
        lengths = [FIRST_TURN + TURN_TOKENS * n for n in range(TURNS)]
        ids = self.texts.document(number, lengths[-1], "cpu")
        listed = ids[0].tolist()
        reference = uninterrupted(self.model, listed)
        for prefill in ("bounded", "exact"):
            # An exact turn costs seconds and depends on nothing that earlier turns computed.
            asked = lengths if prefill == "bounded" else lengths[50::25]
            kl, same, loaded, equal = [], [], [], 0
            with tempfile.TemporaryDirectory() as folder:
                store = Path(folder) / "kv"
                for turn in chain(self.model, listed, lengths=asked, prefill=prefill, folder=store):
                    row = reference[turn.tokens - 1]
                    found = compare(row[None], turn.log_p[None])
                    kl.append(figure(found.kl[0]))
                    same.append(int(found.same[0]))
                    loaded.append(turn.loaded_tokens)
                    equal += int(torch.equal(row, turn.log_p))
            yield {
                "part": "chain",
                "prefill": prefill,
                "lengths": asked,
                "loaded": loaded,
                "kl": kl,
                "same": same,
                "bit_equal": equal,
            }
            if prefill == "bounded":
                places = [(hit, n) for hit, n in zip(loaded, asked, strict=True) if hit][9::10]
        cold = cold_run(self.model, ids, stops={hit for hit, _ in places})
        once = []
        for hit, stop in places:
            state, last = recover(cold, hit, stop, bounded(self.window))
            row = cold.log_probabilities(slice(stop - 1, stop))
            once.append(figure(compare(row, continued(self.model, state, last, [])).kl[0]))
        yield {"part": "once", "lengths": [stop for _, stop in places], "kl": once}

    def long(self, number: int) -> Iterator[dict]:
        """Yield the cells of one long document."""
        ids = self.texts.document(number, LONG_HIT + 16, self.device)
        hits = (LONG_HIT, LONG_HIT + 1)
        ends = [hit + SUFFIX for hit in hits]
        cold = cold_run(self.model, ids, stops={*hits, *ends, *(e - self.window for e in ends)})
        for hit, stop in zip(hits, ends, strict=True):
            recoveries = [KEPT, *self.recoveries(self.window), bounded(0)]
            tokens, reference = greedy(cold, stop, 16)
            for recovery in recoveries:
                yield self.cell(cold, hit, stop, recovery, tokens, reference, "long")


class Texts:
    """Held-out documents, one each, with the begin marker in front."""

    def __init__(self, corpus: Path, tokenizer: Tokenizer) -> None:
        file = corpus / "validation" / "postgresql-doc.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines()
        self._texts = [json.loads(line)["text"] for line in lines]
        self._tokenizer = tokenizer
        self._found: dict[int, list[list[int]]] = {}
        # Neighbours are pages of one chapter; a fixed shuffle takes them apart.
        self._order = np.random.default_rng(7).permutation(len(self._texts)).tolist()

    def document(self, number: int, length: int, device: str) -> torch.Tensor:
        """Return the first `length` ids [1, T] of the `number`-th document that has as many."""
        found = self._found.setdefault(length, list(self._all(length, number + 1)))
        if len(found) <= number:
            found[:] = self._all(length, number + 1)
        if len(found) <= number:
            raise SystemExit(f"corpus: got {len(found)} documents of {length} tokens")
        return torch.tensor([found[number]], device=device)

    def joined(self, number: int, length: int, device: str) -> torch.Tensor:
        """Return `length` ids [1, T] of pages in a row; no two numbers share a page."""
        ids = [self._tokenizer.bos_id]
        for place in self._order[number::16]:
            if len(ids) >= length:
                return torch.tensor([ids[:length]], device=device)
            ids += self._tokenizer.encode(self._texts[place])
        raise SystemExit(f"corpus: got {len(ids)} tokens in a 16th of the pages, expected {length}")

    def _all(self, length: int, count: int) -> Iterator[list[int]]:
        """Yield the first documents of at least `length` ids."""
        for place in self._order:
            if not count:
                return
            # No token of this vocabulary stands for less than a byte.
            if len(self._texts[place].encode()) < length - 1:
                continue
            ids = self._tokenizer.encode(self._texts[place])[: length - 1]
            if len(ids) == length - 1:
                count -= 1
                yield [self._tokenizer.bos_id, *ids]


def loaded(folder: Path, device: str, kernels: str) -> Backbone:
    """Return the model, on a CPU with the engine's compiled products if they are there."""
    model = load_model(folder, ops=FAST).model
    if device != "cpu":
        return model.to_device(device)
    if kernels == "numba":
        return with_ops(model, engine_ops("numba", batch_invariant=True)[0])
    return model


_held: dict[str, Program] = {}


def measured(what: str, n: int, name: str, folder: Path, args: argparse.Namespace) -> dict:
    """Return the line of one unit; a process loads its model once."""
    torch.set_num_threads(1)
    if name not in _held:
        tokenizer = Tokenizer.from_file(folder)
        model = loaded(folder, args.device, args.kernels)
        _held[name] = Program(model, tokenizer, Texts(args.corpus, tokenizer), args.device)
    began = time.time()
    measure: Callable[[int], Iterator[dict]] = getattr(_held[name], what)
    with torch.no_grad():
        cells = list(measure(n))
    about = {"model": name, "digest": folder_digest(folder), "kernels": args.kernels}
    seconds = round(time.time() - began, 1)
    return {"unit": f"{what} {n}", **about, "seconds": seconds, "cells": cells}


def open_units(name: str, folder: Path, args: argparse.Namespace) -> list[tuple[str, int]]:
    """Return the units of a model that its file does not have yet, cheap ones first."""
    out = args.out / f"{name}.jsonl"
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    done = {json.loads(line)["unit"] for line in lines}
    counts = {
        "text": args.documents,
        "suffix": args.documents,
        "facts": args.prompts,
        "crossings": args.prompts,
        "chain": args.chains,
        "long": args.long,
    }
    units = [(what, n) for n in range(max(counts.values())) for what in args.what]
    return [u for u in units if u[1] < counts[u[0]] and "{} {}".format(*u) not in done]


def write(name: str, line: dict, args: argparse.Namespace) -> None:
    about = provenance()
    # Where a folder lies on this machine is nobody's business.
    about["command"] = re.sub(r"(?<=[\s=])/\S*/", "", about["command"])
    with (args.out / f"{name}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**line, **about}) + "\n")
    print(f"{name} {line['unit']}: {len(line['cells'])} cells, {line['seconds']} s", flush=True)


def run_all(models: dict[str, Path], args: argparse.Namespace) -> None:
    """Measure what is missing, models in turns, in this process or in `--workers` others."""
    args.out.mkdir(parents=True, exist_ok=True)
    own = {name: open_units(name, folder, args) for name, folder in models.items()}
    longest = max(map(len, own.values()), default=0)
    tasks = [
        (*units[n], name, models[name], args)
        for n in range(longest)
        for name, units in own.items()
        if n < len(units)
    ]
    if args.workers == 1:
        for task in tasks:
            if time.time() > args.stop_at:
                print(f"{task[2]}: no time for {task[0]} {task[1]}", flush=True)
            else:
                write(task[2], measured(*task), args)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        futures = {pool.submit(measured, *task): task for task in tasks}
        for future in as_completed(futures):
            what, n, name = futures[future][:3]
            try:
                write(name, future.result(), args)
            except Exception as error:
                print(f"{name} {what} {n}: {type(error).__name__}: {error}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", required=True, metavar="NAME=FOLDER")
    what = ["text", "suffix", "facts", "crossings", "chain", "long"]
    parser.add_argument("--what", nargs="*", default=what, choices=what)
    parser.add_argument("--corpus", type=Path, default=Path("data/corpus"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/replay"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--kernels", default="numba", choices=("numba", "torch"))
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=6, help="units of 4 or 6 prefixes")
    parser.add_argument("--chains", type=int, default=2)
    parser.add_argument("--long", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=1e9, help="with one worker")
    args = parser.parse_args()
    args.stop_at = time.time() + args.limit_s
    if args.device == "cuda" and "chain" in args.what:
        print("chain: the engine runs on a CPU; run it there", flush=True)
        args.what = [part for part in args.what if part != "chain"]
    pairs = (item.partition("=") for item in args.model)
    run_all({name: Path(folder) for name, _, folder in pairs}, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
