"""Schemathesis against the server's own description: generated requests, sound and broken ones.

    python bench/fuzz_api.py [--tree DIR] [--requests 10000] [--limit-s 1800] [--url URL]

Makes build/fuzz-venv with the pinned package, starts a server of the tree with the shipped model
(in the limits of watched_server.py) and runs rounds with new seeds until that many requests were
sent. Answers have 4 tokens where a request names no number, and 10 s. Checked is every answer: no
status of 500 to 599 but 503 and 504, no status, content type or body that the description does
not have. --url fuzzes a server that runs already, --description FILE takes another description
than /openapi.json. Exit status 1 after a failed check, an error of the generator, a traceback in
the log, an ended server, or an operation that no request reached, since a description that lets
only refused bodies be generated proves nothing; 2 without a description.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import subprocess
import sys
import time
import urllib.request
from collections import Counter, defaultdict
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError

from hostile_server import WatchedServer

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "schemathesis==4.32.5"
BUILD = ROOT / "build"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)
# 503 and 504 are statuses of a sound server: not ready, over a limit, out of time.
CONFIG = '[checks]\nnot_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 503, 504]\n'
SERVE = ("--max-tokens", "4", "--request-timeout-s", "10")


@dataclass
class Seen:
    """Answers by operation and status, failures of checks, errors of the generator."""

    statuses: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    failures: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def num_requests(self) -> int:
        return sum(sum(counts.values()) for counts in self.statuses.values())

    def read(self, path: Path) -> None:
        """Add the events of one run; a line that was cut by the end of time is left out."""
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                ((kind, event),) = json.loads(line).items()
            except ValueError:
                continue
            if kind in ("NonFatalError", "FatalError"):
                told = event.get("value", event.get("exception", event))
                self.errors[f"{event.get('label')}: {json.dumps(told)[:200]}"] += 1
            elif kind == "ScenarioFinished":
                self._add(event["recorder"])

    def _add(self, recorder: dict[str, Any]) -> None:
        label, cases = recorder["label"], recorder.get("cases", {})
        for case, each in recorder.get("interactions", {}).items():
            response = each.get("response")
            status = str(response["status_code"]) if response else "no answer"
            self.statuses[label][status] += 1
            for check in recorder.get("checks", {}).get(case, ()):
                if check["status"] == "failure":
                    name = f"{label}: {check['name']}, status {status}"
                    self.failures[name] += 1
                    told = {"check": check, "case": cases.get(case, {}).get("value")}
                    self.examples.setdefault(name, json.dumps(told)[:1500])
            if response is None:
                self.failures[f"{label}: no answer"] += 1


def tool() -> Path:
    """Return the program of the pinned package, installed at the first call."""
    folder = BUILD / "fuzz-venv"
    stamp = folder / PACKAGE
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", PACKAGE]
        subprocess.run(command, check=True)
        stamp.touch()
    return folder / "bin" / "st"


def described(url: str, file: Path | None) -> dict[str, Any] | None:
    """Return the description, None where the server has none."""
    if file is not None:
        return json.loads(file.read_text(encoding="utf-8"))
    try:
        with urllib.request.urlopen(f"{url}/openapi.json", timeout=30) as answer:
            return json.load(answer)
    except URLError:
        return None


def started(
    url: str, schema: Path, seed: int, num_examples: int, *, is_first: bool
) -> subprocess.Popen[bytes]:
    """Start one process of the generator in build/fuzz."""
    folder = schema.parent
    (folder / f"events-{seed}.ndjson").unlink(missing_ok=True)
    command = [
        *(str(tool()), "--config-file", str(folder / "schemathesis.toml"), "run", str(schema)),
        *("--url", url, "--checks", ",".join(CHECKS), "--seed", str(seed)),
        *("--phases", "examples,coverage,fuzzing" if is_first else "fuzzing"),
        *("--max-examples", str(num_examples), "--continue-on-failure", "--no-shrink"),
        # One worker: the generator's own parser fails in several threads.
        *("--workers", "1", "--generation-database", "none", "--no-color", "--warnings", "off"),
        *("--request-timeout", "90", "--suppress-health-check", "all"),
        *("--report", "ndjson", "--report-ndjson-path", str(folder / f"events-{seed}.ndjson")),
    ]
    with (folder / f"output-{seed}.txt").open("w") as output:
        return subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)


def fuzz(url: str, description: dict[str, Any], args: argparse.Namespace) -> Seen:
    """Send rounds of requests from several processes until there are enough or time is up."""
    folder, seen = BUILD / "fuzz", Seen()
    folder.mkdir(parents=True, exist_ok=True)
    schema = folder / "openapi.json"
    (folder / "schemathesis.toml").write_text(CONFIG)
    schema.write_text(json.dumps(description))
    methods = {"get", "put", "post", "delete", "options", "head", "patch", "trace"}
    operations = sum(len(methods & set(path)) for path in description["paths"].values())
    tool()
    ends_s, seed = time.monotonic() + args.limit_s, args.seed
    while (left := args.requests - seen.num_requests) > 0 and time.monotonic() < ends_s:
        num_examples = max(10, math.ceil(left / operations / args.processes))
        seeds = range(seed, seed + args.processes)
        running = [
            started(url, schema, each, num_examples, is_first=each == args.seed) for each in seeds
        ]
        while any(process.poll() is None for process in running) and time.monotonic() < ends_s:
            time.sleep(0.5)
        for process in running:
            # What has been sent by then counts.
            process.terminate()
            process.wait()
        before = seen.num_requests
        for each in seeds:
            seen.read(folder / f"events-{each}.ndjson")
        print(f"seeds {seeds[0]} to {seeds[-1]}: {seen.num_requests} requests", flush=True)
        if seen.num_requests == before:
            seen.errors[f"seeds {seeds}: nothing was sent, see {folder}/output-{seed}.txt"] += 1
            break
        seed = seeds[-1] + 1
    return seen


def show(seen: Seen) -> None:
    statuses = sorted({status for counts in seen.statuses.values() for status in counts})
    print(f"\n{'operation':42}" + "".join(f"{status:>10}" for status in statuses))
    for label, counts in sorted(seen.statuses.items()):
        print(f"{label:42}" + "".join(f"{counts[status] or '':>10}" for status in statuses))
    total: Counter[str] = sum(seen.statuses.values(), Counter())
    print(
        f"{f'all {seen.num_requests}':42}" + "".join(f"{total[status]:>10}" for status in statuses)
    )
    for name, count in seen.failures.most_common():
        print(f"FAILED {count} x {name}\n       {seen.examples.get(name, '')}")
    for name, count in seen.errors.most_common():
        print(f"ERROR {count} x {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout whose server runs")
    parser.add_argument("--model", type=Path, help="by default the one that the tree ships")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--limit-s", type=int, default=1800)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=3, help="generators side by side")
    parser.add_argument("--url", help="fuzz this server and start none")
    parser.add_argument("--description", type=Path, help="instead of the server's /openapi.json")
    args = parser.parse_args()
    tree, began_s = args.tree.resolve(), time.monotonic()
    own = [] if args.model is None else [str(args.model.resolve())]
    faults, figures = [], {}
    serving = (
        nullcontext() if args.url else closing(WatchedServer(tree, *own, *SERVE, num_files=4096))
    )
    with serving as server:
        url = args.url.rstrip("/") if server is None else f"http://127.0.0.1:{server.port}"
        description = described(url, args.description)
        if description is None:
            print(f"{url}/openapi.json: not there, expected the server's description")
            return 2
        seen = fuzz(url, description, args)
        if server is not None:
            figures = {"memory": server.memory(), "log": server.log_figures()}
            if not server.is_alive:
                faults.append(f"server ended with {server.process.wait()}")
            faults += [f"traceback in the log: {end}" for end in server.log_figures()["tracebacks"]]
    faults += [
        f"{label}: none of its {sum(counts.values())} requests was answered with 200"
        for label, counts in sorted(seen.statuses.items())
        if not counts["200"]
    ]
    show(seen)
    for fault in faults:
        print(f"FAULT {fault}")
    if seen.num_requests < args.requests:
        faults.append(f"{seen.num_requests} requests, expected {args.requests}")
        print(f"FAULT {faults[-1]}")
    command = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    from record import write_result

    result = {
        "tree_commit": commit or None,
        "package": PACKAGE,
        "msgspec": importlib.metadata.version("msgspec"),
        "requests": seen.num_requests,
        "seconds": round(time.monotonic() - began_s),
        "by_operation": {label: dict(counts) for label, counts in sorted(seen.statuses.items())},
        "failures": dict(seen.failures),
        "errors": dict(seen.errors),
        "faults": faults,
        **figures,
    }
    print("written to", write_result("fuzz_api", result))
    return 1 if seen.failures or seen.errors or faults else 0


if __name__ == "__main__":
    sys.exit(main())
