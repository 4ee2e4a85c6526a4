"""The backbone against a float64 model that goes token by token and key by key."""

import pytest
import torch

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
