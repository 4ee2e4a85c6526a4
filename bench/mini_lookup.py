"""Where finwhale-mini looks a fact up, and whether the candidate pool holds it.

    python bench/mini_lookup.py --model models/finwhale-mini --length 2048 --examples 6
Associative recall with the pairs in the middle of a row. For the last token, the question's key,
each layer's best head on the fact: its share of attention if all entries were visible, its logit
and that of the best other entry, and whether the fact was selected; with the pool and without.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from record import write_result
from torch import Tensor

from finwhale.checkpoint.load import load_model
from finwhale.config import LayerSpec
from finwhale.evals.figures import folder_digest
from finwhale.evals.recall_grid import recall_example
from finwhale.model import Numerics
from finwhale.model.selection_plan import SelectionPlan
from finwhale.ops import FAST
from finwhale.text.tokenizer import Tokenizer
from finwhale.text.train_tokenizer import NUM_FIRST_MARKERS


class Watcher:
    """Keeps, per layer that reads entries, what the last token's heads do with the fact."""

    def __init__(self, fact: int) -> None:
        self.fact, self.topk, self.found = fact, None, {}

    def scored(self, spec: LayerSpec, scores: Tensor, topk: Tensor) -> None:
        self.topk = topk[0, -1].tolist()

    def wants_mass(self, spec: LayerSpec) -> bool:
        return False

    def attended(self, spec: LayerSpec, mass: Tensor | None, inputs: tuple) -> None:
        if spec.topk_owner is None:
            return
        q, window_kv, entries, _, sink, _, window = inputs
        query = q[0, -1].float() * q.shape[-1] ** -0.5  # [H, D]
        far = query @ entries[0].float().T  # [H, M]
        near = query @ window_kv[0, -window:].float().T
        share = torch.cat((far, near, sink.view(-1, 1)), -1).softmax(-1)
        # The value, or the pair of tokens that holds it, and its neighbours.
        places = sorted({(self.fact + n) // spec.ratio for n in (-1, 0, 1)})
        head = int(share[:, places].sum(-1).argmax())
        other = far[head].clone()
        other[places] = -torch.inf
        self.found[spec.layer_id] = {
            "share": round(float(share[head, places].sum()), 4),
            "logit": round(float(far[head, places].max()), 2),
            "best_other": round(float(other.max()), 2),
            "selected": any(p in self.topk for p in places),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/finwhale-mini"))
    parser.add_argument("--name", default="shipped", help="what to call it in the record")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--examples", type=int, default=6)
    args = parser.parse_args()
    model = load_model(args.model, ops=FAST, numerics=Numerics(cache_rounding=False)).model
    tokenizer = Tokenizer.from_file(args.model)
    vocab = range(NUM_FIRST_MARKERS, model.config.text_config.vocab_size - 1)
    for uses_pool in (True, False):
        right, examples = 0, []
        for index in range(args.examples):
            example, distance = recall_example(
                "associative_recall", seed=77, index=index, length=args.length, depth=0.5,
                vocab=vocab, bos_id=tokenizer.bos_id,
            )  # fmt: skip
            watcher = Watcher(args.length - 1 - distance)
            plan = SelectionPlan(observer=watcher, uses_pool=uses_pool)
            ids = torch.tensor([example.tokens[:-1]])
            with torch.no_grad():
                logits = model.logits(model.hidden(ids, plan=plan)[:, -1:])
            is_right = int(logits.argmax()) == example.tokens[-1]
            right += is_right
            examples.append({"right": is_right, "layers": watcher.found})
        record = {
            "model": args.name, "digest": folder_digest(args.model), "length": args.length,
            "uses_pool": uses_pool, "examples": args.examples, "right": right, "each": examples,
        }  # fmt: skip
        print({k: v for k, v in record.items() if k != "each"})
        for example in examples:
            best = max(example["layers"], key=lambda n: example["layers"][n]["share"])
            print(f"  right {example['right']}: L{best} {example['layers'][best]}")
        write_result("mini_lookup", record)


if __name__ == "__main__":
    main()
