"""Load on the server over loopback, beside the bare engine with the same requests.

    python bench/server_load.py [--model models/finwhale-mini] [--clients 1 8 32] [--repeats 3]

Clients ask one request after the other for a stream of /v1/completions: a prompt of random ids, and
a fixed number of greedy tokens without an end. The server runs in a process of its own, the
clients in this one, and so does the bare engine, whose next request is added when one ends. Rounds
of both alternate; figures are of all rounds together, the overhead is that of the medians of
tokens/s. The engine computes on one thread, the server's loop and the clients take a second core:
with fewer than two free cores the overhead is that of the machine and not of the server. The
overhead in processor time, of the server's process against the engine's, is steadier there.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.metadata
import itertools
import json
import math
import multiprocessing
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from record import write_result

from finwhale.checkpoint.load import load_model
from finwhale.config.engine import EngineConfig
from finwhale.config.server import ServerConfig
from finwhale.engine import Engine, SamplingParams
from finwhale.model import Numerics
from finwhale.ops import FAST
from finwhale.text.tokenizer import Tokenizer

MODEL = Path(__file__).resolve().parent.parent / "models" / "finwhale-mini"


@dataclass
class Measured:
    """Figures of requests: seconds to the first token, between tokens, and of each round."""

    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    rounds_s: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def add(self, began_s: float, times_s: list[float]) -> None:
        """Add one request by the times at which something of it arrived."""
        self.first_s.append(times_s[0] - began_s)
        self.between_s += [after - at for at, after in itertools.pairwise(times_s)]

    def tokens_per_s(self) -> float:
        """Return the median of the rounds."""
        rates = [num / took for num, took in zip(self.num_tokens, self.rounds_s, strict=True)]
        return statistics.median(rates)

    def cpu_per_token_s(self) -> float:
        """Return the median of the rounds."""
        costs = [took / num for num, took in zip(self.num_tokens, self.cpu_s, strict=True)]
        return statistics.median(costs)

    def row(self) -> dict[str, float]:
        """Return the figures of the table."""
        return {
            "requests_per_s": round(len(self.first_s) / sum(self.rounds_s), 3),
            "tokens_per_s": round(self.tokens_per_s(), 2),
            "cpu_ms_per_token": round(1e3 * self.cpu_per_token_s(), 2),
            "first_p50_ms": round(1e3 * share_below(self.first_s, 0.5), 1),
            "first_p99_ms": round(1e3 * share_below(self.first_s, 0.99), 1),
            "between_p50_ms": round(1e3 * share_below(self.between_s, 0.5), 2),
            "between_p99_ms": round(1e3 * share_below(self.between_s, 0.99), 2),
        }


def share_below(values: list[float], share: float) -> float:
    """Return the smallest value that at least this share of them does not exceed."""
    return sorted(values)[math.ceil(len(values) * share) - 1] if values else 0.0


def engine_of(folder: Path, max_sequences: int) -> Engine:
    """Return the engine that both sides run."""
    settings = EngineConfig(
        num_blocks=1024, max_sequences=max_sequences, max_batch_tokens=max(256, 2 * max_sequences)
    )
    return Engine(load_model(folder, numerics=Numerics(), ops=FAST).model, settings)


def serve(folder: Path, max_sequences: int, told: Connection) -> None:
    """Serve in this process until it is ended; tell the port, and the processor time on demand."""
    from finwhale.serve.application import create_application
    from finwhale.serve.service import Service
    from finwhale.serve.web_server import bind, web_server

    torch.set_num_threads(1)
    engine = engine_of(folder, max_sequences)
    config = ServerConfig(model_names=("mini",))
    service = Service.of_engine(engine, Tokenizer.from_file(folder), config)
    listener = bind("127.0.0.1", 0)
    server = web_server(create_application(service), service)
    listener.listen()
    told.send(listener.getsockname()[1])

    def tell() -> None:
        while told.recv():
            told.send(time.process_time())

    threading.Thread(target=tell, daemon=True).start()
    server.run(sockets=[listener])


class Prompts:
    """Random ids that no earlier prompt began with."""

    def __init__(self, vocab_size: int, num_tokens: int) -> None:
        self.vocab_size, self.num_tokens = vocab_size, num_tokens
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, count: int) -> list[list[int]]:
        # The upper rows are markers.
        shape = (count, self.num_tokens)
        return torch.randint(300, self.vocab_size // 2, shape, generator=self.generator).tolist()


def bare_round(
    engine: Engine, shares: list[list[list[int]]], new_tokens: int, eos_id: int, into: Measured
) -> None:
    """Serve each client's share by the engine alone."""
    params = SamplingParams(
        max_new_tokens=new_tokens, temperature=0, stop_ids=(eos_id,), logit_bias={eos_id: -100.0}
    )
    left = [list(share) for share in shares]
    asked: dict[str, tuple[int, float, list[float]]] = {}

    def ask(client: int) -> None:
        if left[client]:
            began_s = time.perf_counter()
            asked[engine.add(left[client].pop(0), params)] = client, began_s, []

    began_s, began_cpu_s, num_tokens = time.perf_counter(), time.process_time(), 0
    for client in range(len(shares)):
        ask(client)
    while engine.has_work:
        for output in engine.step():
            client, since_s, times_s = asked[output.request_id]
            num_tokens += len(output.new)
            times_s += [time.perf_counter()] * bool(output.new)
            if output.finish_reason is not None:
                into.add(since_s, times_s)
                ask(client)
    into.rounds_s.append(time.perf_counter() - began_s)
    into.cpu_s.append(time.process_time() - began_cpu_s)
    into.num_tokens.append(num_tokens)


@dataclass
class Served:
    """The other process: its port, and the pipe that tells its processor time."""

    pipe: Connection
    port: int

    def cpu_s(self) -> float:
        self.pipe.send(True)
        return self.pipe.recv()


def server_round(
    server: Served, shares: list[list[list[int]]], new_tokens: int, eos_id: int, into: Measured
) -> None:
    """Ask each client's share over HTTP, clients side by side."""
    lock, failures, counts = threading.Lock(), [], []

    def client(share: list[list[int]]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
        try:
            for prompt in share:
                began_s = time.perf_counter()
                times_s, num_tokens = stream(connection, prompt, new_tokens, eos_id)
                with lock:
                    into.add(began_s, times_s)
                    counts.append(num_tokens)
        except Exception as error:
            failures.append(error)
        finally:
            connection.close()

    began_cpu_s = server.cpu_s()
    threads = [threading.Thread(target=client, args=(share,)) for share in shares]
    began_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    into.rounds_s.append(time.perf_counter() - began_s)
    into.cpu_s.append(server.cpu_s() - began_cpu_s)
    into.num_tokens.append(sum(counts))


def stream(
    connection: http.client.HTTPConnection, prompt: list[int], new_tokens: int, eos_id: int
) -> tuple[list[float], int]:
    """Return when the chunks of one request arrived, and its tokens by its usage."""
    body = {
        "prompt": prompt,
        "max_tokens": new_tokens,
        "temperature": 0,
        "logit_bias": {str(eos_id): -100},
        "stream": True,
    }
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(f"server: got status {response.status}, expected 200: {response.read()!r}")
    times_s, last = [], b""
    while line := response.readline():
        if line.startswith(b"data: {"):
            times_s.append(time.perf_counter())
            last = line
    return times_s, json.loads(last[6:])["usage"]["completion_tokens"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", type=int, default=4, help="of each client in a round")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    widest = max(args.clients)
    engine = engine_of(args.model, widest)
    tokenizer = Tokenizer.from_file(args.model)
    prompts = Prompts(engine.model.config.text_config.vocab_size, args.prompt_tokens)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(args.model, widest, theirs), daemon=True)
    process.start()
    try:
        if not ours.poll(120):
            raise ValueError("server: got no port within 120 s, expected it to start")
        server, rows = Served(ours, ours.recv()), []
        # Compiled kernels load with the first request of a process.
        warm = [prompts.draw(1)]
        bare_round(engine, warm, 8, tokenizer.eos_id, Measured())
        server_round(server, warm, 8, tokenizer.eos_id, Measured())
        for num_clients in args.clients:
            bare, served = Measured(), Measured()
            for _ in range(args.repeats):
                shares = [prompts.draw(args.requests) for _ in range(num_clients)]
                bare_round(engine, shares, args.new_tokens, tokenizer.eos_id, bare)
                server_round(server, shares, args.new_tokens, tokenizer.eos_id, served)
            if bare.num_tokens != served.num_tokens:
                want = f"{bare.num_tokens} as the engine"
                raise ValueError(f"tokens: got {served.num_tokens} served, expected {want}")
            overhead = 1 - served.tokens_per_s() / bare.tokens_per_s()
            cpu_overhead = served.cpu_per_token_s() / bare.cpu_per_token_s() - 1
            rows.append({"clients": num_clients, "overhead": round(overhead, 4)})
            rows[-1] |= {
                "cpu_overhead": round(cpu_overhead, 4),
                "server": served.row(),
                "bare": bare.row(),
            }
            print(f"{num_clients} clients, overhead {overhead:.1%} wall, {cpu_overhead:.1%} cpu")
            for name in ("server", "bare"):
                print(f"  {name:7}", "  ".join(f"{k} {v}" for k, v in rows[-1][name].items()))
    finally:
        process.terminate()
        process.join(10)
    names = ("starlette", "uvicorn", "msgspec", "numba")
    result = {
        "model": args.model.name,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "requests_of_each_client": args.requests,
        "repeats": args.repeats,
        "versions": {name: importlib.metadata.version(name) for name in names},
        "rows": rows,
    }
    print("written to", write_result("server_load", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
