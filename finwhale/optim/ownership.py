"""Which optimiser owns which parameter, decided from the released name and the shape.

One `Rule` per parameter, from three schemes: the report's, AdamW for everything, and Muon with
AdamW in place of Sinkhorn. Refused: a name that no rule knows (a new tensor needs a decision, not
a default) and an indexer under Muon without Muon. The easy mistake: to go by the number of
dimensions alone; Engram's q_weight and k_weight have two and are scales.
Source: spec/training.md sections 1 and II.4.5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from finwhale.config.model import TextConfig
from finwhale.config.presets import DENSE_HEAD_DIM
from finwhale.model import Backbone

SCHEMES = ("report", "adamw", "muon_adamw")
INDEXER_CHOICES = ("frozen", "adamw", "muon")
ROUTER_CHOICES = ("muon", "adamw")
# The report's, for RMSNorm weights: their gradients may be tiny and Adam should still see them.
NORM_EPS = 1e-20
# Matrices of one linear layer each, by the leaf module that holds `weight`.
_LINEAR_LAYERS = frozenset(
    # gate: the router; wq wk wv wo: the dense baseline's
    "wq_a wq_b wkv wo_a wo_b w1 w2 w3 wgate gate wk weights_proj wq wv wo".split()
)
_MIXING_MATRICES = ("hc_attn_fn", "hc_ffn_fn")
_SCALES = frozenset(
    "attn_sink hc_attn_base hc_attn_scale hc_ffn_base hc_ffn_scale q_weight k_weight".split()
)
_STACKS = (".ffn.experts.w1_w3", ".ffn.experts.w2")


class OwnershipError(ValueError):
    """A parameter without an owner, or choices that contradict each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How one parameter is trained.

    optimizer     "muon", "sinkhorn", "adamw" or "frozen"
    heads         number of row blocks that Muon orthogonalises on their own
    lr_scale      times the run's learning rate
    weight_decay  decoupled
    eps           of AdamW
    """

    optimizer: str
    heads: int = 1
    lr_scale: float = 1.0
    weight_decay: float = 0.0
    eps: float = 1e-8


def rule_for(
    name: str,
    shape: tuple[int, ...],
    text_config: TextConfig,
    *,
    scheme: str,
    indexer: str,
    router: str,
    indexer_lr_scale: float = 1.0,
    engram_lr_scale: float = 5.0,
    weight_decay: float = 0.1,
    eps: float = 1e-8,
) -> Rule:
    """Return the rule of the parameter `name` (a released name) of shape `shape`.

    scheme   "report": Muon for matrices of linear layers, head by head where the tensor is a
             stack of heads or groups; Sinkhorn for embedding, head and tables; AdamW for the rest.
             "adamw": AdamW for everything. "muon_adamw": the report's with AdamW for Sinkhorn.
    indexer  "frozen", "adamw" or "muon", for every name below `.attn.indexer.`
    router   "muon" or "adamw" for `gate.weight`; without meaning in the scheme "adamw"

    Weight decay is on matrices and RMSNorm weights in the schemes with Muon, on matrices alone in
    "adamw"; never on Sinkhorn's rows, Engram's tables, sinks, scales and the AdamW indexer.
    """
    _require("scheme", scheme, SCHEMES)
    _require("indexer", indexer, INDEXER_CHOICES)
    _require("router", router, ROUTER_CHOICES)
    if scheme == "adamw" and indexer == "muon":
        raise OwnershipError(
            "indexer: got 'muon' in the scheme 'adamw', which has no Muon; expected 'frozen' or "
            "'adamw'"
        )
    if name.endswith(_STACKS):
        # Stacked experts (finwhale.model.moe): w1 and w3 of each, or its w2.
        if scheme == "adamw":
            return Rule(optimizer="adamw", eps=eps, weight_decay=weight_decay)
        each = 2 if name.endswith("w1_w3") else 1
        heads = each * text_config.n_routed_experts
        return Rule(optimizer="muon", heads=heads, weight_decay=weight_decay)
    parts = name.split(".")
    leaf, owner = parts[-1], parts[-2] if len(parts) > 1 else ""
    adamw = Rule(optimizer="adamw", eps=eps)
    decayed = replace(adamw, weight_decay=weight_decay)
    is_norm = leaf == "weight" and len(shape) == 1 and owner.endswith("norm")
    is_linear = len(shape) == 2 and (
        leaf in _MIXING_MATRICES or (leaf == "weight" and owner in _LINEAR_LAYERS)
    )
    if ".attn.indexer." in name and (is_norm or is_linear):
        if indexer == "frozen":
            return Rule(optimizer="frozen")
        if indexer == "adamw" or is_norm:
            return replace(adamw, lr_scale=indexer_lr_scale)
        heads = text_config.index_n_heads if owner == "wq_b" else 1
        return Rule(
            optimizer="muon", heads=heads, lr_scale=indexer_lr_scale, weight_decay=weight_decay
        )
    if is_norm:
        return adamw if scheme == "adamw" else replace(decayed, eps=NORM_EPS)
    if leaf in _SCALES:
        return adamw
    if name in ("embed.weight", "head.weight"):
        return Rule(optimizer="sinkhorn") if scheme == "report" else decayed
    if name.endswith(".engram.embed.weight"):
        optimizer = "sinkhorn" if scheme == "report" else "adamw"
        return replace(adamw, optimizer=optimizer, lr_scale=engram_lr_scale)
    if is_linear:
        if scheme == "adamw" or (owner == "gate" and router == "adamw"):
            return decayed
        # wkv has one key head that all query heads share: it is whole.
        heads = {"wq_b": text_config.num_attention_heads, "wo_a": text_config.o_groups}
        # The dense baseline's; an indexer's wk was decided above.
        heads |= dict.fromkeys(("wq", "wk", "wv"), shape[0] // DENSE_HEAD_DIM)
        return Rule(optimizer="muon", heads=heads.get(owner, 1), weight_decay=weight_decay)
    raise OwnershipError(
        f"{name}: no rule for this name with shape {shape}; add one to finwhale/optim/ownership.py"
    )


def owners(
    model: Backbone,
    *,
    scheme: str,
    indexer: str,
    router: str,
    indexer_lr_scale: float = 1.0,
    engram_lr_scale: float = 5.0,
    weight_decay: float = 0.1,
    eps: float = 1e-8,
) -> dict[str, Rule]:
    """Return the rule of every parameter of `model` by name; see `rule_for`.

    Each parameter is there once: a tensor under two names would be stepped twice, and is refused.
    """
    names: dict[int, str] = {}
    rules: dict[str, Rule] = {}
    for name, parameter in model.trained_tensors().items():
        first = names.setdefault(id(parameter), name)
        if first != name:
            raise OwnershipError(f"{name}: is the same tensor as {first}; expected one owner")
        rules[name] = rule_for(
            name,
            tuple(parameter.shape),
            model.config.text_config,
            scheme=scheme,
            indexer=indexer,
            router=router,
            indexer_lr_scale=indexer_lr_scale,
            engram_lr_scale=engram_lr_scale,
            weight_decay=weight_decay,
            eps=eps,
        )
    return rules


def _require(field: str, got: str, choices: tuple[str, ...]) -> None:
    if got not in choices:
        raise OwnershipError(f"{field}: got {got!r}, expected one of {', '.join(choices)}")
