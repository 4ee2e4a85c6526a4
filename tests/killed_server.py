"""A server with a cache directory that is killed at random, started again, and asked again.

`ServerKilling.once` starts `finwhale serve`, asks what an earlier server may have stored, sends
fresh prompts from several clients and kills the process at a random moment; some kills come while
it starts. Laws: every reply has the bits of one whole pass from nothing (`tests/uncached_engine`);
blocks that were on the disk once are there after every kill with the same checksums; the survey
behind `finwhale cache verify` finds no damage. `compare` holds the directory against one that an
engine filled without ever being killed.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from finwhale.checkpoint.load import load_model
from finwhale.config.engine import EngineConfig
from finwhale.engine import Engine, SamplingParams
from finwhale.engine.sampler import token_logprobs
from finwhale.model import Numerics
from finwhale.ops import FAST
from finwhale.text.tokenizer import Tokenizer
from finwhale.tiers.disk_check import survey
from finwhale.tiers.disk_segments import Disk, Segment
from finwhale.tiers.disk_store import DiskStore, DiskStoreConfig
from tests.uncached_engine import uncached

ROOT = Path(__file__).resolve().parent.parent
NEW_TOKENS = 4
CLIENTS = 3
# More than a server answers in its time, so that somebody waits when it is killed.
MOST_PROMPTS = 80
# Of a server's life after it has said its address.
LONGEST_S = 3.0
# Chance of a kill before that.
EARLY = 0.15

Reply = list[float]


def records(directory: Path) -> dict[bytes, tuple[int, ...]]:
    """Return the checksums of the groups of every whole record, by the block's address."""
    found = {}
    for path in sorted(directory.glob("segment-*")):
        segment = Segment.open(Disk(), path, writable=False)
        for _, header in segment.scan() if segment else ():
            found[header.address] = header.checksums
    return found


@dataclass
class ServerKilling:
    """Kills of servers that share one directory; prompts are drawn from `seed`.

    held      checksums of every block ever seen on the disk
    moments   what the server was doing: counts
    replies   whole replies that were compared
    cached_tokens  prompt tokens that came from a cache, in those
    """

    folder: Path
    directory: Path
    log: Path
    seed: int = 0
    lengths: tuple[int, int] = (300, 700)
    num_kills: int = 0
    prompts: list[list[int]] = field(default_factory=list)
    held: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    moments: dict[str, int] = field(default_factory=dict)
    replies: int = 0
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        self.model = load_model(self.folder, numerics=Numerics(), ops=FAST).model
        self.tokenizer = Tokenizer.from_file(self.folder)

    def expected(self, prompt: list[int]) -> Reply:
        """Return the log-probabilities of the greedy reply, each from a pass over everything."""
        ids, found = list(prompt), []
        for _ in range(NEW_TOKENS):
            logits = uncached(self.model, ids)[-1:]
            biased = logits[0].clone()
            biased[self.tokenizer.eos_id] = -torch.inf
            ids.append(int(biased.argmax()))
            found.append(token_logprobs(logits, ids[-1:], 0)[0].logprob)
        return found

    def draw_prompt(self, draw: random.Random) -> list[int]:
        """Return a prompt that shares a start of random length with an earlier one, or none."""
        vocab = self.model.config.text_config.vocab_size
        length = draw.randrange(*self.lengths)
        head: list[int] = []
        if self.prompts and draw.random() < 0.5:
            before = draw.choice(self.prompts)
            head = before[: draw.randrange(len(before))]
        rest = max(1, length - len(head))
        return head + [draw.randrange(3, vocab // 2) for _ in range(rest)]

    def once(self) -> list[str]:
        """Start a server, ask, kill it, look at its directory; return what broke a law."""
        self.num_kills += 1
        draw = random.Random(f"{self.seed} {self.num_kills}")
        problems: list[str] = []
        old = draw.sample(self.prompts, min(2, len(self.prompts)))
        fresh = [self.draw_prompt(draw) for _ in range(MOST_PROMPTS)]
        with self._process() as process:
            if draw.random() < EARLY:
                time.sleep(draw.uniform(0.0, 6.0))
                moment = "starting"
            else:
                port = self._port(process)
                problems += self._ask(port, old)
                moment = self._traffic(process, port, fresh, draw.uniform(0.1, LONGEST_S), problems)
            if process.poll() not in (None, -signal.SIGKILL):
                problems.append(f"the server ended by itself: {self.log.read_text()[-300:]}")
        self.moments[moment] = self.moments.get(moment, 0) + 1
        return problems + self.verify()

    def _traffic(self, process, port: int, prompts, delay_s: float, problems: list[str]) -> str:
        """Ask from several clients; kill after a while. Return whether somebody waited then."""
        left, is_over, waiting = list(prompts), threading.Event(), [0]

        def client() -> None:
            while left and not is_over.is_set():
                prompt = left.pop()
                self.prompts.append(prompt)
                waiting[0] += 1
                # A cut connection is what a kill is.
                with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                    problems.extend(self._ask(port, [prompt]))
                waiting[0] -= 1

        clients = [threading.Thread(target=client) for _ in range(CLIENTS)]
        for each in clients:
            each.start()
        time.sleep(delay_s)
        is_over.set()
        moment = "answering" if waiting[0] else "idle"
        process.kill()
        for each in clients:
            each.join()
        process.wait()
        return moment

    @contextlib.contextmanager
    def _process(self) -> Iterator[subprocess.Popen]:
        options = ["--port", "0", "--cache-size", "256MB", "--num-blocks", "64"]
        options += ["--cache-dir", str(self.directory)]
        with self.log.open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "finwhale", "serve", str(self.folder), *options],
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def _port(self, process) -> int:
        for _ in range(1200):
            text = self.log.read_text(encoding="utf-8")
            if found := re.search(r"on http://127\.0\.0\.1:(\d+)", text):
                return int(found.group(1))
            if process.poll() is not None:
                raise RuntimeError(text[-300:])
            time.sleep(0.05)
        raise RuntimeError("the server did not start")

    def _ask(self, port: int, prompts: list[list[int]]) -> list[str]:
        """Send prompts one by one; return a sentence for each reply that is not the uncached one.

        OSError or HTTPException when the server goes away.
        """
        problems = []
        for prompt in prompts:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            body = {
                "model": "deepseek-flash",
                "prompt": prompt,
                "max_tokens": NEW_TOKENS,
                "temperature": 0,
                "logprobs": 0,
                "logit_bias": {str(self.tokenizer.eos_id): -100},
            }
            headers = {"Content-Type": "application/json"}
            try:
                connection.request("POST", "/v1/completions", json.dumps(body), headers)
                answer = connection.getresponse()
                told = json.loads(answer.read())
            finally:
                connection.close()
            if answer.status != 200:
                problems.append(f"status {answer.status}: {told}")
                continue
            found = told["choices"][0]["logprobs"]["token_logprobs"]
            if found != self.expected(prompt):
                problems.append(f"another reply to {len(prompt)} tokens: {found}")
            self.replies += 1
            details = told["usage"].get("prompt_tokens_details") or {}
            self.cached_tokens += details.get("cached_tokens", 0)
        return problems

    def verify(self) -> list[str]:
        """Return what is wrong with the directory as the killed server left it."""
        if not (self.directory / "LOCK").exists():
            return ["the directory is gone"] if self.held else []
        found = records(self.directory)
        problems = survey(self.directory).problems
        problems += [f"lost {a.hex()[:8]}" for a in self.held.keys() - found.keys()]
        problems += [
            f"other bytes {a.hex()[:8]}"
            for a, sums in found.items()
            if self.held.get(a, sums) != sums
        ]
        self.held |= found
        return problems

    def compare(self, clean: Path) -> tuple[int, list[str]]:
        """Fill `clean` without a kill; return how many blocks are in both, and which differ."""

        def open_tier(namespace: bytes, sizes: tuple[int, ...]) -> DiskStore:
            return DiskStore(
                DiskStoreConfig(
                    directory=clean,
                    namespace=namespace,
                    max_bytes=1 << 28,
                    segment_bytes=1 << 24,
                    group_bytes=sizes,
                )
            )

        digest = hashlib.sha256(self.tokenizer.raw.to_str().encode()).hexdigest()
        engine = Engine(
            self.model, EngineConfig(num_blocks=64), tokenizer_digest=digest, open_tier=open_tier
        )
        for prompt in self.prompts:
            engine.generate([prompt], SamplingParams(max_new_tokens=1, temperature=0))
        engine.close()
        right = records(clean)
        both = right.keys() & self.held.keys()
        return len(both), [f"differs {a.hex()[:8]}" for a in both if right[a] != self.held[a]]
