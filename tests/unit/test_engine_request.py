"""What a request may ask: every option's range, the ids of a vocabulary, and whole increments."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from finwhale.engine.request import (
    Constraint,
    RequestError,
    RequestOutput,
    SamplingParams,
    TokenResult,
)


class _AnyToken:
    """The least thing that is a constraint."""

    is_finished = False

    def mask(self):
        return torch.ones(3, dtype=torch.bool)

    def advance(self, token):
        pass

    def copy(self):
        return self


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", -1),
        ("max_new_tokens", 1.0),
        ("max_new_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", "1"),
        ("presence_penalty", 2.001),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.001),
        ("frequency_penalty", True),
        ("top_p", 0),
        ("top_p", 1.0001),
        ("top_p", math.nan),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("min_p", math.nan),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("seed", 0.5),
        ("stop_ids", (3, -1)),
        ("stop_ids", (True,)),
        ("logprobs", 1),
        ("top_logprobs", 21),
        ("top_logprobs", 3),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("n", 0),
        ("logit_bias", {-1: 0.5}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: "2"}),
        ("logit_bias", ((1, 0.5), (1, 0.5))),
        ("constraint", object()),
    ],
)
def test_params_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(RequestError, match=rf"^{field}: got .*, expected ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_new_tokens": 0, "prompt_logprobs": 0},
        {"temperature": 0, "top_p": 1, "min_p": 1},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"logprobs": True, "top_logprobs": 20, "prompt_logprobs": 20},
        {"logit_bias": {4: -math.inf, 0: 7}},
        {"constraint": _AnyToken()},
    ],
)
def test_params_at_their_limits_are_taken(fields):
    params = SamplingParams(**fields)
    assert {name: getattr(params, name) for name in fields if name != "logit_bias"} == {
        name: value for name, value in fields.items() if name != "logit_bias"
    }


def test_bias_is_one_value_in_every_spelling():
    params = [SamplingParams(logit_bias=b) for b in ({5: 1, 2: -3.0}, [(2, -3), (5, 1.0)])]
    assert params[0] == params[1]
    assert params[0].bias == ((2, -3.0), (5, 1.0))
    assert hash(params[0]) == hash(params[1])
    assert dataclasses.replace(params[0], top_k=3).bias == params[0].bias


def test_ids_are_checked_against_the_vocabulary():
    params = SamplingParams(stop_ids=(9,), logit_bias={7: 1.0})
    params.check(10)
    with pytest.raises(RequestError, match="stop_ids: got id 9, expected ids below 9"):
        params.check(9)
    with pytest.raises(RequestError, match="logit_bias: got id 7, expected ids below 7"):
        dataclasses.replace(params, stop_ids=()).check(7)


def test_values_cannot_be_changed_or_given_by_position():
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2
    for kind in (SamplingParams, TokenResult, RequestOutput):
        with pytest.raises(TypeError):
            kind(1)
    assert isinstance(_AnyToken(), Constraint)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("finish_reason", {"finish_reason": "eos"}),
        ("error", {"finish_reason": "error"}),
        ("error", {"finish_reason": "stop", "error": "no"}),
        ("error", {"error": "no"}),
        ("fault", {"finish_reason": "error", "error": "no"}),
        ("fault", {"fault": "model"}),
        ("index", {"index": -1}),
        ("num_cached_tokens", {"num_cached_tokens": -1}),
    ],
)
def test_outputs_that_contradict_themselves_are_refused(field, fields):
    with pytest.raises(RequestError, match=f"^{field}: "):
        RequestOutput(request_id="r", **fields)


def test_output_is_last_exactly_with_a_reason():
    assert not RequestOutput(request_id="r", new=(TokenResult(token=3),)).is_last
    for reason in ("stop", "length", "cancelled"):
        assert RequestOutput(request_id="r", finish_reason=reason).is_last
    failed = {"finish_reason": "error", "error": "why", "fault": "engine"}
    assert RequestOutput(request_id="r", **failed).is_last
