"""The backbone against a float64 model that goes token by token and key by key."""

import pytest
import torch

from finwhale.model.stale_slot import stale_slot_logits
from tests.models import token_ids, unit_model
from tests.per_token_model import PerToken

TWO_OWNERS = {
    "kv_source_layer_ids": (1, 3, 4, 6),
    "index_source_layer_ids": (1, 3, 4, 6),
}
FORMS = {
    "released": {},
    "two-decoder-owners": TWO_OWNERS,
    "general-ced": {**TWO_OWNERS, "ced_kv_from": "encoder_output"},
}


@pytest.mark.parametrize("tokens", [1, 2, 3, 45])
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_forward_equals_the_per_token_model(form, tokens):
    model, ids = unit_model(**FORMS[form]), token_ids(1, tokens)
    want = torch.from_numpy(PerToken(model).logits(ids[0].tolist()))
    got = model(ids)[0].double()
    assert float((got - want).norm() / want.norm()) < 1e-5


@torch.no_grad()
def test_the_forms_differ():
    ids = token_ids(1, 45)
    own, general = (unit_model(**FORMS[f])(ids) for f in ("two-decoder-owners", "general-ced"))
    assert float((own - general).norm() / own.norm()) > 0.05


@pytest.mark.parametrize("prefill", [pytest.param(24, marks=pytest.mark.slow), 25])
@torch.no_grad()
def test_stale_slot_rule_equals_the_per_token_model(prefill):
    # D08: 12 and more entries of which 8 are selected, so the slot's owner decides.
    model, ids = unit_model(), token_ids(1, 30)
    want = torch.from_numpy(PerToken(model).stale_slot_logits(ids[0].tolist(), prefill))
    got = stale_slot_logits(model, ids, prefill)[0].double()
    assert float((got - want).norm() / want.norm()) < 1e-5
    owner = model(ids)[0].double()
    assert float((owner - want).norm() / want.norm()) > 1e-3
