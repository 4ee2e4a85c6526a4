"""Prefill and decode seconds of ftllm on a checkpoint; runs inside ftllm's environment.

    python bench/peers/ftllm_decode.py CHECKPOINT IDS_JSON NEW_TOKENS
Prints one JSON object.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time

os.environ["FASTLLM_SKIP_WARMUP"] = "1"


def serve(library, model, ids: list[int], steps: int, buffer) -> list[tuple[float, float]]:
    """Return (wall, processor) seconds since the start at each token."""
    stamps, start, cpu_start = [], time.perf_counter(), time.process_time()
    handle = library.launch_response_llm_model(
        model,
        len(ids),
        (ctypes.c_int * len(ids))(*ids),
        ctypes.c_int(steps),
        ctypes.c_int(0),
        ctypes.c_bool(False),
        ctypes.c_float(1.0),
        ctypes.c_int(1),
        ctypes.c_float(1.0),
        ctypes.c_float(1.0),
        ctypes.c_bool(True),
        ctypes.c_int(0),
        None,
    )
    while library.fetch_response_logits_llm_model(model, handle, buffer) >= 0:
        stamps.append((time.perf_counter() - start, time.process_time() - cpu_start))
    return stamps


def main() -> None:
    from ftllm import llm
    from ftllm.util import make_normal_llm_model, make_normal_parser

    folder, ids, steps = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        vocab = json.load(file)["text_config"]["vocab_size"]
    argv = ["--path", folder, "--device", "cpu", "--moe_device", "cpu", "-t", "1"]
    argv += ["--cuda_shared_expert", "false"]
    options = make_normal_parser("peer").parse_args(argv)
    options.max_batch, options.tokens = 1, max(4096, len(ids) + steps)
    model = make_normal_llm_model(options)
    buffer = (ctypes.c_float * vocab)()
    # It repacks weights at their first use; a prompt that shares no prefix takes that away.
    serve(llm.fastllm_lib, model.model, ids[::-1], steps, buffer)
    stamps = serve(llm.fastllm_lib, model.model, ids, steps, buffer)
    print(
        "\n"
        + json.dumps(
            {
                "prefill_s": stamps[0][0],
                "prefill_cpu_s": stamps[0][1],
                "decode_s": stamps[-1][0] - stamps[0][0],
                "decode_cpu_s": stamps[-1][1] - stamps[0][1],
                "decoded": len(stamps) - 1,
            }
        )
    )
    sys.stdout.flush()
    os._exit(0)  # the engine's threads do not end by themselves


if __name__ == "__main__":
    main()
