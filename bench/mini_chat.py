"""Shares of right replies of a chat model by kind of conversation, on held-out problems.

    python bench/mini_chat.py --count 20
Every assistant turn that the generator wrote is asked for, greedily, with the true turns before it,
and graded: reasoning closed, calls in the right syntax, the right calls, the right answer, stopped
by itself. One JSON line per kind.
"""

from __future__ import annotations

import argparse
import collections
import sys

from record import write_result

from finwhale.checkpoint.load import load_model
from finwhale.checkpoint.shipped import shipped_model
from finwhale.conversations.tasks import (
    CHAT_TASKS,
    HELD_OUT_SEED,
    assistant_places,
    chat_example,
    reply_checks,
)
from finwhale.engine import Engine, EngineConfig, SamplingParams
from finwhale.ops import FAST
from finwhale.text.prompt import encode_prompt
from finwhale.text.tokenizer import Tokenizer

_FIELDS = ("closed", "syntax", "calls", "answer", "stopped", "right")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default=None, help="checkpoint folder; the shipped one if absent"
    )
    parser.add_argument("--kinds", nargs="*", default=list(CHAT_TASKS))
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    args = parser.parse_args()
    folder = args.model or shipped_model()
    tokenizer = Tokenizer.from_file(folder)
    model = load_model(folder, ops=FAST).model
    engine = Engine(model, EngineConfig(num_blocks=512, max_sequences=16))
    for kind in args.kinds:
        asked, prompts = [], []
        for index in range(args.count):
            example = chat_example(kind, seed=HELD_OUT_SEED + 1, index=index)
            for turn, place in enumerate(assistant_places(example)):
                asked.append((example, turn))
                prompts.append(
                    encode_prompt(
                        tokenizer,
                        example.messages[:place],
                        tools=example.tools or None,
                        thinking=example.thinking,
                        effort=example.effort,
                    )
                )
        sampling = SamplingParams(
            max_new_tokens=args.max_new_tokens, temperature=0, stop_ids=(tokenizer.eos_id,)
        )
        right: collections.Counter[str] = collections.Counter()
        for (example, turn), choices in zip(asked, engine.generate(prompts, sampling), strict=True):
            ids = [result.token for result in choices[0]]
            stopped = bool(ids) and ids[-1] == tokenizer.eos_id
            text = tokenizer.decode([i for i in ids if i != tokenizer.eos_id])
            checks = reply_checks(kind, example, text, turn=turn, stopped=stopped)
            right.update(name for name in _FIELDS if getattr(checks, name))
        line = {"kind": kind, "group": CHAT_TASKS[kind], "turns": len(asked)}
        line |= {name: right[name] for name in _FIELDS}
        print(line, flush=True)
        write_result("mini_chat", line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
