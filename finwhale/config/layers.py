"""The layer table: what each layer attends to, owns, reads and shares, resolved once.

This file is the only place that knows the schedule. The model, the cache arithmetic, the
accounting and the printed table all loop over these records. The encoder-decoder cut is
`candidate_source_layer_id`, never half the layers. Source: spec/backbone.md section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from finwhale.config.files import shown

if TYPE_CHECKING:
    from finwhale.config.model import TextConfig


class AttentionMode(Enum):
    """How a layer comes by the entries it attends to beside its window."""

    WINDOW = "window"  # no entries at all
    FULL = "full"  # makes the entries and index keys, and selects among them
    REINDEX = "reindex"  # selects anew among another layer's entries
    REUSE = "reuse"  # attends to the selection of the layer before it


class PoolUse(Enum):
    """A layer's part in the hierarchical candidate pool (section 5.5)."""

    NONE = "none"
    BUILDS = "builds"
    SEARCHES = "searches"


class Half(Enum):
    """Side of the causal encoder-decoder cut (section 3)."""

    ENCODER = "encoder"
    DECODER = "decoder"


class RopeKind(Enum):
    """Which rotary table every rotation of a layer uses (section 4.7)."""

    WINDOW = "window"  # rope_theta, no YaRN
    COMPRESSED = "compressed"  # compress_rope_theta with YaRN


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One row of the table. `None` owners mean that the layer reads no entries."""

    layer_id: int
    half: Half
    mode: AttentionMode
    ratio: int
    kv_owner: int | None
    topk_owner: int | None
    pool: PoolUse
    rope: RopeKind
    engram_index: int | None

    @property
    def owns_kv(self) -> bool:
        return self.mode is AttentionMode.FULL

    @property
    def owns_topk(self) -> bool:
        return self.mode in (AttentionMode.FULL, AttentionMode.REINDEX)

    @property
    def has_engram(self) -> bool:
        return self.engram_index is not None


def _check_sources(name: str, ids: tuple[int, ...], num_layers: int) -> None:
    from finwhale.config.model import ConfigError

    if list(ids) != sorted(set(ids)) or any(not 0 <= i < num_layers for i in ids):
        raise ConfigError(
            f"text_config.{name}: got {shown(list(ids))}, expected sorted, unique layer ids below "
            f"num_hidden_layers = {num_layers}"
        )


def build_layer_specs(config: TextConfig) -> tuple[LayerSpec, ...]:
    """Return one validated LayerSpec per backbone layer.

    Raises ConfigError for a schedule that no forward pass could follow. Section 2.
    """
    from finwhale.config.model import ConfigError

    num_layers, cut = config.num_hidden_layers, config.candidate_source_layer_id
    kv_ids, index_ids = config.kv_source_layer_ids, config.index_source_layer_ids
    _check_sources("kv_source_layer_ids", kv_ids, num_layers)
    _check_sources("index_source_layer_ids", index_ids, num_layers)
    _check_sources("engram_layer_ids", config.engram_layer_ids, num_layers)
    missing = sorted(set(kv_ids) - set(index_ids))
    if missing:
        raise ConfigError(
            f"text_config.index_source_layer_ids: lacks {shown(missing)}; every KV source is one"
        )
    is_windowed = not (kv_ids or index_ids or any(config.compress_ratios))
    if is_windowed:
        # Nothing global anywhere: the cut only tells the halves apart.
        if not 0 <= cut < num_layers:
            raise ConfigError(
                f"text_config.candidate_source_layer_id: got {cut}, expected a layer id below "
                f"num_hidden_layers = {num_layers}"
            )
    elif cut not in kv_ids:
        raise ConfigError(
            f"text_config.candidate_source_layer_id: got {cut}, expected one of the "
            f"kv_source_layer_ids {shown(list(kv_ids))} (the pool builder owns the keys it scores)"
        )
    ratios = config.compress_ratios
    drafts = ratios[num_layers:]
    ending = shown(list(drafts))
    if len(ratios) not in (num_layers, num_layers + config.num_nextn_predict_layers) or any(drafts):
        raise ConfigError(
            f"text_config.compress_ratios: got {len(ratios)} entries ending in {ending}, "
            f"expected {num_layers} backbone ratios, then zeros for the "
            f"{config.num_nextn_predict_layers} draft stages or nothing"
        )
    specs: list[LayerSpec] = []
    kv_owner = topk_owner = None
    for layer_id in range(num_layers):
        ratio = ratios[layer_id]
        if ratio not in (0, 1, 2):
            raise ConfigError(
                f"text_config.compress_ratios[{layer_id}]: got {ratio}, expected 0, 1, 2"
            )
        if layer_id in kv_ids:
            kv_owner = layer_id
        if layer_id in index_ids:
            topk_owner = layer_id
        if ratio == 0:
            if layer_id in index_ids:
                raise ConfigError(f"layer {layer_id}: ratio 0 (window only) but named as a source")
            mode, owners = AttentionMode.WINDOW, (None, None)
        else:
            if kv_owner is None or topk_owner is None:
                raise ConfigError(
                    f"layer {layer_id}: ratio {ratio} but no KV source at or below it"
                )
            if ratios[kv_owner] != ratio:
                raise ConfigError(
                    f"layer {layer_id}: ratio {ratio} but its KV owner {kv_owner} has "
                    f"{ratios[kv_owner]}"
                )
            if topk_owner < kv_owner:
                raise ConfigError(f"layer {layer_id}: top-k owner {topk_owner} precedes KV owner")
            if layer_id == kv_owner:
                mode = AttentionMode.FULL
            elif layer_id == topk_owner:
                mode = AttentionMode.REINDEX
            else:
                mode = AttentionMode.REUSE
            owners = (kv_owner, topk_owner)
        # The pool holds entries of its builder, so only selections among those can use it (D05).
        searches = mode is AttentionMode.REINDEX and layer_id > cut and kv_owner == cut
        builds = layer_id == cut and not is_windowed
        specs.append(
            LayerSpec(
                layer_id=layer_id,
                half=Half.DECODER if layer_id >= cut else Half.ENCODER,
                mode=mode,
                ratio=ratio,
                kv_owner=owners[0],
                topk_owner=owners[1],
                pool=PoolUse.BUILDS if builds else PoolUse.SEARCHES if searches else PoolUse.NONE,
                rope=RopeKind.COMPRESSED if ratio else RopeKind.WINDOW,
                engram_index=(
                    config.engram_layer_ids.index(layer_id)
                    if layer_id in config.engram_layer_ids
                    else None
                ),
            )
        )
    return tuple(specs)
