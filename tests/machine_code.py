"""What the tiled products become for a Hopper GPU, compiled without one: run by its unit test.

    python -m tests.machine_code
A line of JSON per kernel: the counts of products left under way at each wait ("waits"), and the
bytes of a word that each call of a decoder gets together ("bytes"), and what the machine code does
in global memory before it waits for the launch before ("early"). A process of its own,
since other tests import the kernels for the interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from finwhale.decode_kernels import (
    experts_w4,
    gather_attention,
    hyper_site,
    linear_fp8,
    route,
    store_rows,
)
from finwhale.decode_kernels.tiles import _by_warp, _dot, _fp8_decoded

SHAPE = {
    "BM": 16, "EVEN": True, "WARPS": 4, "OVERLAP": 2, "UPCAST": False, "SPLITS": 1, "AHEAD": 4,
}  # fmt: skip


@triton.jit
def _careless_kernel(x_ptr, w_ptr, out_ptr, groups):
    """The control: products on top of a sum, which the next step does not wait for."""
    row, column = tl.arange(0, 16)[:, None], tl.arange(0, 64)[None, :]
    tile = tl.arange(0, 4)[:, None, None, None] * groups + tl.arange(0, 2)[None, :, None, None]
    half = tile * 2 + tl.arange(0, 2)[None, None, :, None]
    at_w = w_ptr + half * 512 + tl.arange(0, 512)[None, None, None, :]
    acc = tl.zeros([128, 16], tl.float32)
    for k in range(0, groups, 2):
        codes = tl.full([4, 2], 127, tl.int32)
        x = tl.load(x_ptr + row * groups * 32 + column + k * 32)
        w = _fp8_decoded(tl.load(at_w + k * 1024), codes, 4, False)
        acc = _dot(_by_warp(w, 4), x, acc, False)
    tl.store(out_ptr + tl.arange(0, 128)[:, None] * 16 + tl.arange(0, 16)[None, :], acc)


def compiled(kernel, constants: dict, dtypes: dict[str, str]):
    """Compile for sm_90; pointers and sizes are multiples of 16, numbers of groups are not."""
    names = kernel.arg_names
    constants = {name: constants[name] for name in names if name in constants}
    signature = {
        name: "constexpr"
        if name in constants
        else dtypes.get(name, "*i32" if "ptr" in name else "i32")
        for name in names
    }
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name not in constants
        and (
            name.endswith("_ptr")
            or name in ("C", "F", "K", "x_row")
            or (name == "chunk" and "F" not in names)
        )
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": 4, "num_stages": 3}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


# The control of `together`: threads with two bytes of a word, by both kinds of layout.
SPLIT_WORDS = """
#blocked = #ttg.blocked<{sizePerThread = [1, 1, 1, 2], threadsPerWarp = [1, 1, 16, 2], order = [3, 2, 1, 0]}>
#linear = #ttg.linear<{register = [[0, 0, 0, 1], [0, 1, 0, 0]], lane = [[0, 0, 0, 2]]}>
%0 = tt.elementwise_inline_asm "" %a : tensor<1x2x256x4xi8, #blocked> -> tensor<1x2x256x4xbf16, #blocked>
%1 = tt.elementwise_inline_asm "" %b : tensor<1x2x256x4xi8, #linear> -> tensor<1x2x256x4xbf16, #linear>
"""  # noqa: E501
# The control of `passed_on`: once in a loop, once behind it.
PASSED = """
%0 = scf.for %i = %a to %b step %c {
  %1 = ttg.local_alloc %w : (tensor<64x128xbf16, #linear>) -> !ttg.memdesc<64x128xbf16, #shared>
  scf.yield %1
}
%2 = ttg.local_alloc %x : (tensor<128x16xbf16, #linear>) -> !ttg.memdesc<128x16xbf16, #shared>
"""


# The control of `until_the_wait`: two branches, one of which waits after it writes.
BRANCHES = """
        /*0000*/               @P0 BRA `(.L_x_1) ;
        /*0010*/                   ACQBULK ;
        /*0020*/                   STG.E desc[UR4][R2.64], R5 ;
        /*0030*/                   EXIT ;
.L_x_1:
        /*0040*/                   STG.E desc[UR4][R2.64], R5 ;
        /*0050*/                   ACQBULK ;
        /*0060*/                   EXIT ;
"""


def together(ttgir: str) -> list[int]:
    """Return, for each call of a decoder, how many bytes of a word a thread has in a row."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ttgir, re.MULTILINE))
    found = []
    for line in ttgir.splitlines():
        if "elementwise_inline_asm" not in line:
            continue
        operand = re.search(r"tensor<[0-9x]+x4xi8, (#\w+)>", line)
        if operand is None:
            continue
        layout = layouts[operand[1]]
        if "blocked" in layout:
            sizes = json.loads(re.search(r"sizePerThread = (\[[^\]]*\])", layout)[1])
            order = json.loads(re.search(r" order = (\[[^\]]*\])", layout)[1])
            found.append(sizes[-1] if order[0] == len(sizes) - 1 else 1)
        else:
            bases = json.loads(re.search(r"register = (\[\[.*?\]\])", layout)[1])
            last = [base[-1] if not any(base[:-1]) else 0 for base in bases]
            found.append(4 if last[:2] == [1, 2] else 2 if last[:1] == [1] else 1)
    return found


def passed_on(ttgir: str) -> int:
    """Return how many tensors each step of the loops puts into shared memory from registers."""
    loops = re.findall(r"scf\.for .*?scf\.yield", ttgir, re.DOTALL)
    return sum(len(re.findall(r"ttg\.local_alloc %", loop)) for loop in loops)


def machine_code(asm) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        tool = str(Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm")
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True)
    return done.stdout


def until_the_wait(text: str) -> tuple[list[str], int]:
    """Return the instructions that some path reaches without a wait, and how many waits end one."""
    code, labels = [], {}
    for line in text.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*)", line):
            code.append(instruction[1])
    reached, ahead, waits = set(), [0], 0
    while ahead:
        place = ahead.pop()
        if place in reached or place >= len(code):
            continue
        reached.add(place)
        target = re.search(r"\bBRA .*\((\.L_x_\d+)\)", code[place])
        if "ACQBULK" in code[place]:
            waits += 1
            continue
        if target:
            ahead.append(labels[target[1]])
        is_end = target or re.search(r"\b(EXIT|RET)\b", code[place])
        if code[place].startswith("@") or not is_end:
            ahead.append(place + 1)
    return [code[place] for place in sorted(reached)], waits


def before_the_wait(text: str) -> dict[str, int]:
    """Count what machine code does, on any path, before it waits for earlier launches."""
    code, waits = until_the_wait(text)
    before = "\n".join(code)
    counts = {
        "reads": r"LDG\.E(?!\.128)",
        "past_l1": r"LDG\.E(?:\.64|\.128)?\.STRONG\.GPU",
        "wide": r"LDG\.E\.128",
        "writes": r"STG|ATOM|RED\.",
        "copies": r"LDGSTS\.E",
        "copies_past_l1": r"LDGSTS\.E\.BYPASS",
        "copies_by_word": r"LDGSTS\.E \[",
        "inversions": r"MUFU\.RCP",
        "products": r"HMMA|HGMMA",
    }
    found = {name: len(re.findall(what, before)) for name, what in counts.items()}
    # The next launch is let in behind the wait, and no earlier.
    return found | {
        "waits": waits,
        "lets": "PREEXIT" in text,
        "lets_early": "PREEXIT" in before,
    }


def main() -> int:
    pointers = dict.fromkeys(("w_ptr", "s_ptr", "shared_ptr", "shared_s_ptr"), "*u8")
    halves = dict.fromkeys(("x_ptr", "hidden_ptr", "out_ptr"), "*bf16")
    floats = {"part_ptr": "*fp32", "weights_ptr": "*fp32", "turn_ptr": "*fp32", "limit": "fp32"}
    dtypes = pointers | halves | floats
    kernels = {
        "gate and up": (experts_w4._gate_up_kernel, {"HALF": 64, "BK": 128, "ONE": False}),
        "gate and up, one": (
            experts_w4._gate_up_kernel,
            {"HALF": 64, "BK": 128, "ONE": True, "SPLITS": 2, "OVERLAP": 3},
        ),
        "down": (experts_w4._down_kernel, {"BN": 128, "BK": 128, "ONE": True}),
        "product": (
            linear_fp8._linear_kernel,
            {
                "KIND": 1, "BN": 64, "BK": 128, "ONE": True, "ROUND": True, "HEAD": 0, "R2": 0,
                "IS_ROW": False,
            },
        ),
        "wide product": (
            linear_fp8._linear_kernel,
            {
                "KIND": 1, "BM": 64, "BN": 128, "BK": 128, "ONE": False, "ROUND": False,
                "HEAD": 512, "R2": 32, "IS_ROW": False, "AHEAD": 0,
            },
        ),
        "narrow product": (
            linear_fp8._linear_kernel,
            {
                "KIND": 1, "BN": 32, "BK": 64, "ONE": True, "ROUND": True, "HEAD": 0, "R2": 0,
                "IS_ROW": False, "AHEAD": 0, "EVEN": False,
            },
        ),
        "row": (
            linear_fp8._linear_kernel,
            {
                "KIND": 0, "BM": 1, "BN": 32, "BK": 256, "ONE": True, "ROUND": False, "HEAD": 0,
                "R2": 0, "IS_ROW": True, "SPLITS": 4, "AHEAD": 8,
            },
        ),
        "site": (
            hyper_site._site_kernel,
            {"CS": 64, "SP": 128, "CA": 4096, "CB": 1024, "PARTS": 7, "MAKES": True, "LATE": True},
        ),
        "streams": (hyper_site._streams_kernel, {"CS": 32, "TB": 16, "PARTS": 7}),
        "attention": (
            gather_attention._split_kernel,
            {
                "H": 64, "HEADS": 16, "HALF": 256, "KEYS": 32, "SPLITS": 20, "SHARES": 1, "R2": 32,
                "FAST": True, "AHEAD": True,
            },
        ),
        "combine": (
            gather_attention._combine_kernel,
            {"H": 64, "HALF": 256, "SPLITS": 20, "SHARES": 1, "R2": 32, "OVERLAP": 3},
        ),
        "router": (
            route._route_kernel,
            {
                "KEPT": 6, "KP": 8, "BX": 16, "BK": 256, "BM": 1, "SPLITS": 20, "PADDED": 32,
                "XP": 128, "APART": False, "AHEAD": True,
            },
        ),
        "latent": (
            store_rows._latent_window_kernel,
            {"AP": 2048, "HALF": 256, "R2": 32, "PAIRS": 16, "OVERLAP": 3},
        ),
        "careless": (_careless_kernel, {}),
    }  # fmt: skip
    site = dict.fromkeys(
        "post_ptr comb_ptr incoming_ptr fn_ptr base_ptr scale_ptr new_pre_ptr new_post_ptr"
        " new_comb_ptr logits_ptr new_logits_ptr sums_ptr bias_ptr rotation_ptr".split(),
        "*fp32",
    ) | dict.fromkeys(("norm_eps", "eps", "scaling"), "fp32")
    site |= dict.fromkeys(
        "streams_ptr parts_ptr rounded_ptr z_ptr norm_ptr joined_ptr q_weight_ptr"
        " latent_ptr".split(),
        "*bf16",
    )
    site |= {"ring_ptr": "*u8", "rows_ptr": "*i64"}
    own = {"row": {"w_ptr": "*bf16"}, "router": {"w_ptr": "*bf16"}}
    own["attention"] = {
        "ring_ptr": "*i16", "ring_scale_ptr": "*u8", "window_ptr": "*i64", "main_ptr": "*u8",
        "entry_ptr": "*i64", "sink_ptr": "*fp32", "stats_ptr": "*fp32", "factor": "fp32",
        "q_ptr": "*i32", "out_ptr": "*i32",
    }  # fmt: skip
    own["combine"] = own["attention"]
    own["careless"] = {"out_ptr": "*fp32"}
    for name, (kernel, constants) in kernels.items():
        asm = compiled(kernel, SHAPE | constants, dtypes | site | own.get(name, {}))
        waits = [
            int(n) for n in re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", asm["ptx"])
        ]
        line = {
            "kernel": name,
            "waits": waits,
            "bytes": together(asm["ttgir"]),
            "passed on": passed_on(asm["ttgir"]),
            "early": before_the_wait(machine_code(asm)),
        }
        sys.stdout.write(json.dumps(line) + "\n")
    line = {"kernel": "branches", "early": before_the_wait(BRANCHES)}
    sys.stdout.write(json.dumps(line) + "\n")
    line = {"kernel": "split words", "bytes": together(SPLIT_WORDS), "passed on": passed_on(PASSED)}
    sys.stdout.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
