"""Supervised conversations with known answers, for a model far too small to learn from chat logs.

Owns whole conversations: questions of `problems`, tool calls with the results of simulated
tools, system messages, thinking and effort. `chat_example` is a pure function of its arguments;
every answer comes from the rule that made the question, and `reply_checks` grades a model's reply
by the same record. Refused: a reply judged under another kind than its example's. The easy
mistake: without tools only the last turn of a thinking conversation can be learned from.
Prompt format: spec/multimodal-serving.md sections B.2 to B.5; this file only makes messages.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from finwhale.conversations.problems import (
    NAME,
    REASONING,
    RETRIEVAL,
    SMALL_TALK,
    ChatTaskError,
    Draw,
    Exchange,
    distinct,
    facts_of_side,
    key_of_side,
    made_up,
)
from finwhale.text.special_tokens import DSML, END_THINK, EOS, THINK

# Seeds from here on draw problems and names of the held-out side only.
HELD_OUT_SEED = 1_000_000
# One turn of a tool loop fits into about this many tokens with all tools declared.
MIN_TOKENS, MIN_TOKENS_WITH_TOOLS = 200, 1_200


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatExample:
    """One conversation that ends with the assistant.

    messages  OpenAI-style dicts: role, content, reasoning_content, tool_calls, tool_call_id
    tools     declared tools, empty for none
    effort    1 to 100; without `thinking` it says nothing
    answers   one per assistant message: what its content has to say; "" when it calls tools
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    thinking: bool
    effort: int
    kind: str
    answers: tuple[str, ...]


# --- tools -------------------------------------------------------------------------------------


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in parameters.items()},
        "required": list(parameters),
    }
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS: dict[str, dict[str, Any]] = {
    tool["function"]["name"]: tool
    for tool in (
        _tool("calculate", "Evaluate an expression with + - * and brackets.", expression="string"),
        _tool("get_value", "Read the value of a key.", key="string"),
        _tool("set_value", "Store a number under a key.", key="string", value="integer"),
        _tool("list_files", "List the files of a folder.", folder="string"),
        _tool("read_file", "Read a text file.", path="string"),
    )
}
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def calculate(expression: str) -> int:
    """Return the value of an expression of integers, + - * and brackets; refuse all else."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ChatTaskError(f"expression: got {expression!r}, expected integers and + - * ( )")

    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ChatTaskError(f"expression: got {expression!r}, not readable; check it") from None


def run_tool(
    name: str,
    arguments: Mapping[str, Any],
    *,
    store: dict[str, int],
    files: Mapping[str, str],
) -> str:
    """Return the result text of a call and update `store`; a failed call returns "error: ..."."""
    try:
        if name == "calculate":
            return str(calculate(arguments["expression"]))
        if name == "get_value":
            key = arguments["key"]
            return str(store[key]) if key in store else f"error: no value for {key}"
        if name == "set_value":
            store[arguments["key"]] = int(arguments["value"])
            return "ok"
        if name == "list_files":
            start = f"{arguments['folder'].rstrip('/')}/"
            found = sorted(path[len(start) :] for path in files if path.startswith(start))
            return "\n".join(found) or f"error: no folder {arguments['folder']}"
        if name == "read_file":
            path = arguments["path"]
            return files.get(path, f"error: no file {path}")
    except (ChatTaskError, KeyError, TypeError, AttributeError, ValueError) as error:
        return f"error: {error}"
    return f"error: no tool {name}"


def _call(draw: Draw, name: str, **arguments: Any) -> tuple[str, Mapping[str, Any], str]:
    return name, arguments, run_tool(name, arguments, store=draw.store, files=draw.files)


def _tool_calculator(draw: Draw) -> Exchange:
    rng = draw.rng

    def make() -> str:
        terms = [str(rng.randrange(2, 10 ** rng.choice((2, 3, 4)))) for _ in range(3)]
        first, second = rng.choice("+-*"), rng.choice("+-*")
        text = f"{terms[0]} {first} {terms[1]}"
        return rng.choice((text, text, f"{text} {second} {terms[2]}", f"({text}) * {terms[2]}"))

    expression = draw.ours(make)
    question = rng.choice(("What is {}?", "Calculate {}.", "{} =", "Please work out {}."))
    question = question.format(expression)
    if re.fullmatch(r"\d+ \* \d+", expression) and rng.random() < 0.5:
        each, boxes = expression.split(" * ")
        thing = rng.choice(("pens", "apples", "books", "nails", "stamps"))
        question = f"A box holds {each} {thing}. How many {thing} do {boxes} boxes hold?"
    call = _call(draw, "calculate", expression=expression)
    before = draw.reason("calculate", f"I calculate {expression} with the tool.")
    return Exchange(
        question=question,
        steps=((before, (call,)),),
        reasoning=draw.reason(call[2], f"The result is {call[2]}."),
        content=call[2],
        answer=call[2],
    )


def _tool_key_value(draw: Draw) -> Exchange:
    rng = draw.rng
    for key in distinct(lambda: key_of_side(draw), 3):
        draw.store.setdefault(key, rng.randrange(10_000))
    first, second = rng.sample(sorted(draw.store), 2)
    form = rng.choice(("get", "get", "set", "both", "copy", "missing"))
    if form == "set":
        value = rng.randrange(10_000)
        ask = rng.choice(("Set {} to {}.", "Store {1} under {0}.", "Remember that {} is {}."))
        steps = [
            (f"I store {value} under {first}.", (_call(draw, "set_value", key=first, value=value),))
        ]
        return _finish(
            draw, ask.format(first, value), steps, f"I set {first} to {value}.", str(value)
        )
    if form == "both":
        calls = (_call(draw, "get_value", key=first), _call(draw, "get_value", key=second))
        said = f"{first} is {calls[0][2]} and {second} is {calls[1][2]}."
        ask = rng.choice(("What are the values of {} and {}?", "Get {} and {}."))
        steps = [(f"I read {first} and {second}.", calls)]
        return _finish(draw, ask.format(first, second), steps, said, said[:-1])
    if form == "copy":
        read = _call(draw, "get_value", key=first)
        write = _call(draw, "set_value", key=second, value=int(read[2]))
        steps = [
            (f"I read {first} first.", (read,)),
            (f"{first} is {read[2]}. I store it under {second}.", (write,)),
        ]
        said = f"I set {second} to {read[2]}."
        return _finish(draw, f"Copy the value of {first} to {second}.", steps, said, read[2])
    ask = rng.choice(("What is the value of {}?", "Get {}.", "Which number is stored under {}?"))
    if form == "missing":
        first = draw.ours(lambda: made_up(rng), lambda key: key)
        while first in draw.store:
            first += rng.choice("bdfg") + "a"
    call = _call(draw, "get_value", key=first)
    said = f"The value of {first} is {call[2]}."
    if form == "missing":
        said = f"There is no value for {first}."
    answer = "no value" if form == "missing" else call[2]
    return _finish(draw, ask.format(first), [(f"I read {first}.", (call,))], said, answer)


def _finish(
    draw: Draw, question: str, steps: Sequence[tuple[str, tuple]], said: str, answer: str
) -> Exchange:
    short = [(draw.reason(calls[0][0], why), calls) for why, calls in steps]
    reasoning = draw.reason("done", "I have the result.", "I tell the user.")
    return Exchange(
        question=question, steps=tuple(short), reasoning=reasoning, content=said, answer=answer
    )


def _tool_files(draw: Draw) -> Exchange:
    rng = draw.rng
    folder = rng.choice(("docs", "notes", "data", "letters", "plans"))
    if not any(path.startswith(f"{folder}/") for path in draw.files):
        names = distinct(lambda: key_of_side(draw), rng.randint(1, 3))
        for name, (attribute, subject, value) in zip(
            names, facts_of_side(draw, len(names)), strict=True
        ):
            said = f"The {attribute} of the {subject} is {value}."
            draw.files[f"{folder}/{name}.{rng.choice(('txt', 'md'))}"] = said
    paths = sorted(path for path in draw.files if path.startswith(f"{folder}/"))
    path = rng.choice(paths)
    said = draw.files[path]
    form = rng.choice(("list", "read", "read", "find", "missing"))
    listing = _call(draw, "list_files", folder=folder)
    look = (f"I list the folder {folder}.", (listing,))
    if form == "list":
        found = listing[2].replace("\n", ", ")
        ask = rng.choice(("Which files are in {}?", "List the folder {}.", "What is in {}?"))
        return _finish(draw, ask.format(folder), [look], f"The files are: {found}", found)
    if form == "missing":
        path = f"{folder}/{key_of_side(draw)}.log"
        call = _call(draw, "read_file", path=path)
        steps = [(f"I read {path}.", (call,))]
        return _finish(draw, f"Read {path}.", steps, f"There is no file {path}.", "no file")
    read = (f"I read {path}.", (_call(draw, "read_file", path=path),))
    if form == "find" and len(paths) == 1:
        subject = re.sub(r" is \S+$", "", said).removeprefix("The ")
        ask = f"What is the {subject}? A file in {folder} says it."
        return _finish(draw, ask, [look, read], said, said[:-1].split()[-1])
    ask = rng.choice(("What does {} say?", "Read {}.", "Show me {}.")).format(path)
    return _finish(draw, ask, [read], said, said[:-1])


# --- conversations -----------------------------------------------------------------------------

_TOOL_KINDS: dict[str, tuple[Callable[[Draw], Exchange], tuple[str, ...]]] = {
    "tool_calculator": (_tool_calculator, ("calculate",)),
    "tool_key_value": (_tool_key_value, ("get_value", "set_value")),
    "tool_files": (_tool_files, ("list_files", "read_file")),
}
_PLAIN = {**REASONING, **SMALL_TALK}
_LONG = "long_"
CHAT_TASKS: dict[str, str] = {
    **dict.fromkeys(RETRIEVAL, "retrieval"),
    **{_LONG + kind: "retrieval" for kind in RETRIEVAL},
    **dict.fromkeys(REASONING, "reasoning"),
    **dict.fromkeys((*_TOOL_KINDS, "tool_mixed", "tool_unneeded"), "tools"),
    **dict.fromkeys(SMALL_TALK, "small talk"),
}
_SYSTEM = (
    f"You are {NAME}.",
    f"You are {NAME}, a small test model.",
    "Answer briefly.",
    "You are a helpful assistant.",
    "Use the text and nothing else.",
)


def _exchanges(draw: Draw, kind: str, thinking: bool) -> list[Exchange]:
    """Return the exchanges of one conversation, the first of them of `kind`."""
    rng = draw.rng
    few = draw.budget is not None and draw.budget < 1_000
    group = CHAT_TASKS[kind]
    # Without tools earlier reasoning is dropped from the prompt, so that only the last turn of a
    # thinking conversation is learned from.
    if group == "tools":
        count = 1 if few else rng.randint(1, 5)
    elif thinking:
        count = 2 if rng.random() < 0.15 and not few else 1
    else:
        least, most = (4, 16) if kind.startswith(_LONG) else (1, 12 if group == "retrieval" else 5)
        count = 1 if few else rng.randint(least, most)
    if group == "retrieval":
        low, high = (1_000, 3_800) if kind.startswith(_LONG) else (100, 1_000)
        return RETRIEVAL[kind.removeprefix(_LONG)](draw, low, high, count)
    if group == "tools":
        return [_tool_exchange(draw, kind) for _ in range(count)]
    last = [_PLAIN[kind](draw)]
    return [_PLAIN[rng.choice(list(_PLAIN))](draw) for _ in range(count - 1)] + last


def _tool_exchange(draw: Draw, kind: str) -> Exchange:
    rng = draw.rng
    ready = [make for make, names in _TOOL_KINDS.values() if draw.tool_names.issuperset(names)]
    if kind in _TOOL_KINDS and rng.random() < 0.85:
        return _TOOL_KINDS[kind][0](draw)
    if kind != "tool_unneeded" and rng.random() < 0.7:
        return rng.choice(ready)(draw)
    # A sum is done by hand only where no calculator is declared.
    skipped = ("chain_sum", "products") if "calculate" in draw.tool_names else ()
    by_hand = [kind for kind in REASONING if kind not in skipped]
    kinds = list(SMALL_TALK) if rng.random() < 0.6 else by_hand
    return _PLAIN[rng.choice(kinds)](draw)


def _declared(rng: Random, kind: str) -> list[str]:
    """Return the names of the tools to declare, in random order."""
    groups = [names for _, names in _TOOL_KINDS.values()]
    chosen = [names for names in groups if rng.random() < 0.4]
    if kind in _TOOL_KINDS:
        chosen.append(_TOOL_KINDS[kind][1])
    elif kind == "tool_mixed":
        chosen += rng.sample(groups, 2)
    names = sorted({name for group in chosen or [rng.choice(groups)] for name in group})
    return rng.sample(names, len(names))


def _effort(rng: Random) -> int:
    return rng.choice((50, 75, 100, rng.randint(1, 100)))


def _messages(
    exchanges: Sequence[Exchange], thinking: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the messages of all exchanges, and per assistant message what it has to say."""
    messages: list[dict[str, Any]] = []
    answers: list[str] = []
    calls_made = 0
    for exchange in exchanges:
        messages.append({"role": "user", "content": exchange.question})
        for reasoning, calls in exchange.steps:
            turn: dict[str, Any] = {"role": "assistant", "content": ""}
            if thinking:
                turn["reasoning_content"] = reasoning
            turn["tool_calls"] = []
            results = []
            for name, arguments, result in calls:
                number = f"call_{calls_made:02d}"
                calls_made += 1
                function = {"name": name, "arguments": json.dumps(arguments)}
                turn["tool_calls"].append({"id": number, "type": "function", "function": function})
                results.append({"role": "tool", "tool_call_id": number, "content": result})
            messages += [turn, *results]
            answers.append("")
        turn = {"role": "assistant", "content": exchange.content}
        if thinking:
            turn["reasoning_content"] = exchange.reasoning
        messages.append(turn)
        answers.append(exchange.answer)
    return messages, answers


def chat_example(
    kind: str,
    *,
    seed: int,
    index: int,
    max_tokens: int | None = None,
    passages: Sequence[str] = (),
) -> ChatExample:
    """Return conversation number `index` of a kind: a function of its arguments.

    kind        a key of CHAT_TASKS
    seed        from HELD_OUT_SEED on: problems and names that no smaller seed gives
    max_tokens  what contexts are sized for, by an estimate of characters per token; measure the
                encoded length where it must hold
    passages    real text to hide facts in, neighbours following one another; held-out
                conversations need held-out passages
    """
    if kind not in CHAT_TASKS:
        raise ChatTaskError(f"kind: got {kind!r}, expected one of {', '.join(CHAT_TASKS)}")
    with_tools = CHAT_TASKS[kind] == "tools"
    least = MIN_TOKENS_WITH_TOOLS if with_tools else MIN_TOKENS
    if max_tokens is not None and max_tokens < least:
        raise ChatTaskError(f"max_tokens: got {max_tokens}, expected at least {least} for {kind}")
    rng = Random(f"{kind}/{seed}/{index}")
    # A thinking conversation about a long context has one answer to learn, another has many.
    share = 0.25 if kind.startswith(_LONG) else 0.4 if CHAT_TASKS[kind] == "retrieval" else 0.6
    thinking = rng.random() < share
    effort = _effort(rng)
    names = _declared(rng, kind) if with_tools else []
    draw = Draw(
        rng=rng,
        held_out=seed >= HELD_OUT_SEED,
        level=0 if effort <= 50 else 1 if effort <= 85 else 2,
        budget=max_tokens,
        passages=passages,
        tool_names=frozenset(names),
    )
    messages, answers = _messages(_exchanges(draw, kind, thinking), thinking)
    if rng.random() < 0.15:
        texts = _SYSTEM if CHAT_TASKS[kind] == "retrieval" else _SYSTEM[:-1]
        messages.insert(0, {"role": "system", "content": rng.choice(texts)})
    return ChatExample(
        messages=tuple(messages),
        tools=tuple(TOOLS[name] for name in names),
        thinking=thinking,
        effort=effort,
        kind=kind,
        answers=tuple(answers),
    )


# --- grading -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyChecks:
    """What is right about one reply: reasoning closed, markup well formed, calls and answer."""

    closed: bool
    syntax: bool
    calls: bool
    answer: bool
    stopped: bool

    @property
    def right(self) -> bool:
        return self.closed and self.syntax and self.calls and self.answer and self.stopped


_CALLS = re.compile(rf"\n\n<{DSML} calls>\n(.*)</{DSML} calls>", re.DOTALL)
_INVOKE = re.compile(rf'<{DSML} invoke name="([^"\n]+)">\n(.*?)</{DSML} invoke>\n', re.DOTALL)
_PARAMETER = re.compile(
    rf'<{DSML} parameter name="([^"\n]+)" string="(true|false)">(.*?)</{DSML} parameter>\n',
    re.DOTALL,
)
# Words that may stand around an answer besides those of the question and of the written reply.
_EMPTY_WORDS = frozenset("the it its is are a an answer value result of so and".split())


def _read_calls(block: str) -> list[tuple[str, dict[str, Any]]] | None:
    """Return the calls of the inside of a calls block; None unless all of it is calls."""
    calls = []
    if _INVOKE.sub("", block) or not block:
        return None
    for name, body in _INVOKE.findall(block):
        if _PARAMETER.sub("", body).strip("\n"):
            return None
        arguments: dict[str, Any] = {}
        for key, is_string, value in _PARAMETER.findall(body):
            try:
                arguments[key] = value if is_string == "true" else json.loads(value)
            except ValueError:
                return None
        calls.append((name, arguments))
    return calls


def _same_calls(got: Sequence[tuple[str, Any]], want: Sequence[tuple[str, Any]]) -> bool:
    """Return whether calls agree in order; expressions agree when their values do."""
    if len(got) != len(want):
        return False
    for (got_name, got_arguments), (name, arguments) in zip(got, want, strict=True):
        if got_name != name:
            return False
        if name != "calculate":
            if got_arguments != arguments:
                return False
            continue
        try:
            if calculate(got_arguments["expression"]) != calculate(arguments["expression"]):
                return False
        except (ChatTaskError, KeyError, TypeError, AttributeError):
            return False
    return True


def _says(kind: str, content: str, answer: str, reference: str, question: str) -> bool:
    """Return whether `content` gives `answer` and nothing that could be another answer."""
    low = content.lower()
    if not re.search(rf"(?<![\w-]){re.escape(answer.lower())}(?!\w)", low):
        return False
    if CHAT_TASKS[kind] == "small talk":
        return len(content) <= 3 * len(reference) + 40
    known = set(re.findall(r"-?\w+", f"{reference} {answer}".lower())) | _EMPTY_WORDS
    # The question's own context may hold other values, so only the words of its last line count,
    # and "or" would let a reply name two values.
    known |= set(re.findall(r"[a-z]+", question.lower().splitlines()[-1])) - {"or"}
    return set(re.findall(r"-?\w+", low)) <= known and len(content) <= 3 * len(reference) + 40


def reply_checks(
    kind: str,
    example: ChatExample,
    reply: str | Mapping[str, Any],
    *,
    turn: int = -1,
    stopped: bool = True,
) -> ReplyChecks:
    """Return what is right about a reply in place of assistant message number `turn`.

    reply    the text generated after the header (`<think>` stands in the prompt), the end marker
             at most at its end; or a parsed message with reasoning_content, content, tool_calls
    turn     counts assistant messages, -1 the last; the prompt is everything before it
    stopped  whether generation ended by itself and not by a limit
    """
    if kind != example.kind:
        raise ChatTaskError(f"kind: got {kind!r}, expected the example's, {example.kind!r}")
    places = assistant_places(example)
    place = places[turn]
    wanted = example.messages[place]
    question = next(m["content"] for m in reversed(example.messages[:place]) if m["role"] == "user")
    closed, syntax = True, True
    calls: list[tuple[str, Any]] = []
    if isinstance(reply, str):
        text = reply.removesuffix(EOS)
        if example.thinking:
            _, mark, content = text.partition(END_THINK)
            closed = bool(mark)
        else:
            content = text
        if THINK in text or END_THINK in content or EOS in content:
            syntax = False
        content, opener, rest = content.partition(f"\n\n<{DSML}")
        if opener:
            block = _CALLS.fullmatch(opener + rest)
            found = _read_calls(block[1]) if block else None
            syntax, calls = syntax and found is not None, found or []
        syntax = syntax and DSML not in content
    else:
        content = reply.get("content") or ""
        for call in reply.get("tool_calls") or ():
            try:
                arguments = json.loads(call["function"]["arguments"])
            except ValueError:
                arguments, syntax = None, False
            calls.append((call["function"]["name"], arguments))
        closed = bool(content or calls)
    want = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in wanted.get("tool_calls", ())
    ]
    answer = example.answers[turn]
    return ReplyChecks(
        closed=closed,
        syntax=syntax,
        calls=_same_calls(calls, want),
        answer=not answer or _says(kind, content, answer, wanted["content"], question),
        stopped=stopped,
    )


def chat_checks(
    kind: str,
    example: ChatExample,
    reply: str | Mapping[str, Any],
    *,
    turn: int = -1,
    stopped: bool = True,
) -> bool:
    """Return whether a reply is right in every respect of `reply_checks`."""
    return reply_checks(kind, example, reply, turn=turn, stopped=stopped).right


def assistant_places(example: ChatExample) -> list[int]:
    """Return the indices of the assistant's messages: what may be generated and graded."""
    return [i for i, m in enumerate(example.messages) if m["role"] == "assistant"]
