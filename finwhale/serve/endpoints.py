"""All endpoints of the protocols in one table, and their description at /openapi.json.

The table makes the routes (application.py) and the description, so neither can forget the other.
The description is OpenAPI 3.1: bodies from the structs that decode them, answers from answers.py,
every status that a path can have. It reveals names of models and nothing of requests, and is
served without a key. It refuses to be exact about streams: their events are text to OpenAPI.
A newcomer's mistake: taking a body that fits the description for one that is served; prompts,
schemas and sizes are looked at when a request is prepared, and refused with 400.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

import finwhale
from finwhale.config.server import ServerConfig
from finwhale.serve import answers, messages_body, responses_body, schema
from finwhale.serve.anthropic_api import (
    anthropic_body,
    claude_models,
    count_tokens,
    messages,
    models_of_either,
    one_claude_model,
    one_model_of_either,
)
from finwhale.serve.exchange import ErrorBody, Handler
from finwhale.serve.openai_api import chat_completions, chat_error, completion_error, completions
from finwhale.serve.responses_api import input_tokens, responses, responses_error

ANTHROPIC = "/anthropic"
# Whether requests are served, twice, and whether the engine lives.
STATES = ("/health", "/readyz", "/livez")
_POST_STATUSES = {
    400: "the body could never be served; the message names field and remedy",
    401: "no known API key",
    403: "the Host header is none of this server's names",
    404: "no such path",
    405: "another method is wanted",
    408: "the body did not arrive in time",
    413: "the body is too large",
    415: "the body is not JSON, or in a coding that is not read",
    429: "this tenant has too many requests; come back after Retry-After",
    500: "the engine failed on this request",
    503: "not ready, over a limit, or going down; come back after Retry-After",
    504: "the answer took longer than the server allows",
}
_GET_STATUSES = {
    status: _POST_STATUSES[status] for status in (400, 401, 403, 404, 405, 429, 500, 503)
}
_RANGES: dict[str, dict[str, Any]] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": 0},
    "min_p": {"minimum": 0, "maximum": 1},
    "n": {"minimum": 1},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "max_output_tokens": {"minimum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "top_logprobs": {"minimum": 0, "maximum": 20},
}
_ROLES = ["system", "developer", "user", "assistant", "tool"]
_CHAT_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": _ROLES},
        "content": {
            "anyOf": [
                {"type": "string"},
                {"type": "null"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    },
                },
            ]
        },
        "reasoning_content": {"type": ["string", "null"]},
        "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
        "tool_call_id": {"type": ["string", "null"]},
        "prefix": {"type": ["boolean", "null"]},
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """One path with its method, its handler and what the description says of it.

    error_body  writes errors in the protocol's own words
    body        struct of the request's JSON, None for GET
    answers     structs of the whole answer; two where the caller's headers decide
    streams     whether `stream: true` gives server-sent events
    """

    path: str
    method: str
    handler: Handler
    error_body: ErrorBody
    answers: tuple[type, ...]
    body: type | None = None
    streams: bool = False

    @property
    def error(self) -> type:
        """Struct of the error body."""
        is_claude = self.error_body is anthropic_body
        return answers.AnthropicError if is_claude else answers.OpenAIError


def endpoints() -> Iterator[Endpoint]:
    """Yield all endpoints of the protocols.

    Some clients are given the address with /v1 and some without; the hosted service has both.
    Clients of Anthropic add /v1 themselves, to an address with /anthropic or without.
    """
    for prefix in ("/v1", ""):
        yield Endpoint(
            path=f"{prefix}/chat/completions",
            method="POST",
            handler=chat_completions,
            error_body=chat_error,
            body=schema.ChatBody,
            answers=(answers.ChatAnswer,),
            streams=True,
        )
        yield Endpoint(
            path=f"{prefix}/completions",
            method="POST",
            handler=completions,
            error_body=completion_error,
            body=schema.CompletionBody,
            answers=(answers.TextAnswer,),
            streams=True,
        )
        yield Endpoint(
            path=f"{prefix}/responses",
            method="POST",
            handler=responses,
            error_body=responses_error,
            body=responses_body.ResponsesBody,
            answers=(answers.ResponsesAnswer,),
            streams=True,
        )
        yield Endpoint(
            path=f"{prefix}/responses/input_tokens",
            method="POST",
            handler=input_tokens,
            error_body=responses_error,
            body=responses_body.InputTokensBody,
            answers=(answers.InputTokens,),
        )
        yield Endpoint(
            path=f"{prefix}/models",
            method="GET",
            handler=models_of_either,
            error_body=chat_error,
            answers=(answers.ModelList, answers.ClaudeModelList),
        )
        yield Endpoint(
            path=f"{prefix}/models/{{name}}",
            method="GET",
            handler=one_model_of_either,
            error_body=chat_error,
            answers=(answers.Model, answers.ClaudeModel),
        )
    for prefix in (f"{ANTHROPIC}/v1", "/v1"):
        yield Endpoint(
            path=f"{prefix}/messages",
            method="POST",
            handler=messages,
            error_body=anthropic_body,
            body=messages_body.MessagesBody,
            answers=(answers.MessageAnswer,),
            streams=True,
        )
        yield Endpoint(
            path=f"{prefix}/messages/count_tokens",
            method="POST",
            handler=count_tokens,
            error_body=anthropic_body,
            body=messages_body.CountTokensBody,
            answers=(answers.CountedTokens,),
        )
    yield Endpoint(
        path=f"{ANTHROPIC}/v1/models",
        method="GET",
        handler=claude_models,
        error_body=anthropic_body,
        answers=(answers.ClaudeModelList,),
    )
    yield Endpoint(
        path=f"{ANTHROPIC}/v1/models/{{name}}",
        method="GET",
        handler=one_claude_model,
        error_body=anthropic_body,
        answers=(answers.ClaudeModel,),
    )


def is_anthropic(path: str) -> bool:
    """Return whether errors of this path have Anthropic's body."""
    return path.startswith((f"{ANTHROPIC}/", "/v1/messages"))


@functools.lru_cache(maxsize=4)
def description(config: ServerConfig) -> bytes:
    """Return the OpenAPI description of a server with these settings, as JSON."""
    table = list(endpoints())
    kinds = {each.body for each in table} | {kind for each in table for kind in each.answers}
    kinds |= {answers.OpenAIError, answers.AnthropicError, answers.Health}
    structs = sorted((kind for kind in kinds if kind is not None), key=lambda kind: kind.__name__)
    _, components = msgspec.json.schema_components(structs, ref_template=_REF)
    for kind in (each.body for each in table if each.body is not None):
        _narrow(
            components[kind.__name__], config, is_claude=kind.__module__ == messages_body.__name__
        )
    paths: dict[str, dict[str, Any]] = {}
    for each in table:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each, config)
    for path in STATES:
        state = {"200": _told("it is so", answers.Health), "503": _told("why not", answers.Health)}
        paths[path] = {"get": {"operationId": path.strip("/"), "security": [], "responses": state}}
    told = {
        "openapi": "3.1.0",
        "info": {"title": "finwhale", "version": finwhale.__version__},
        "security": [{}, {"bearer": []}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
    return msgspec.json.encode(told)


_REF = "#/components/schemas/{name}"


def _operation(endpoint: Endpoint, config: ServerConfig) -> dict[str, Any]:
    statuses = _POST_STATUSES if endpoint.body is not None else _GET_STATUSES
    whole = _told("the answer", *endpoint.answers)
    if endpoint.streams:
        # Without a schema, which would be one for each event.
        whole["content"]["text/event-stream"] = {}
    whole["headers"] = {
        "x-request-id": {"schema": {"type": "string"}},
        "x-finwhale-note": {
            "schema": {"type": "string"},
            "description": "what was served otherwise than asked",
        },
    }
    responses = {"200": whole}
    responses |= {str(s): _told(text, endpoint.error) for s, text in statuses.items()}
    words = endpoint.path.replace("{", "").replace("}", "").strip("/").split("/")
    operation: dict[str, Any] = {
        "operationId": "_".join([endpoint.method.lower(), *words]),
        "summary": str(endpoint.handler.__doc__).splitlines()[0],
        "responses": responses,
    }
    if "{name}" in endpoint.path:
        names = {"type": "string", "enum": list(config.model_names)}
        operation["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": names}
        ]
    if endpoint.body is not None:
        ref = {"$ref": _REF.format(name=endpoint.body.__name__)}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": ref}},
        }
    return operation


def _told(text: str, *kinds: type) -> dict[str, Any]:
    refs = [{"$ref": _REF.format(name=kind.__name__)} for kind in kinds]
    told = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"description": text, "content": {"application/json": {"schema": told}}}


def _narrow(component: dict[str, Any], config: ServerConfig, *, is_claude: bool) -> None:
    """Add to a body's description what its types do not say: ranges, names, messages."""
    fields: Mapping[str, dict[str, Any]] = component["properties"]
    for name, limits in _RANGES.items():
        if name in fields:
            fields[name].update({"description": "null is the default", **limits})
    if "model" in fields and not is_claude:
        fields["model"]["enum"] = [None, *config.model_names]
    if "messages" in fields:
        fields["messages"]["minItems"] = 1
    if component.get("title") == "ChatBody":
        fields["messages"]["items"] = _CHAT_MESSAGE
