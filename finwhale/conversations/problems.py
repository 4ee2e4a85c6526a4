"""Questions with checked answers for supervised conversations: retrieval, reasoning, small talk.

Owns the generators behind `finwhale.conversations.tasks`: facts hidden in real text, lists to look
things up in, problems of reasoning-gym (the extra `conversations`) with rule-made reasoning, short
talk.
Refused: a problem whose written reasoning does not end in the answer that reasoning-gym scores.
The easy mistake: held-out seeds alone hold nothing out, since "3 + 5" comes again under every
seed; here each problem and name belongs to one side by its hash (`is_held_out`).
Source: own rules; problems and answers by reasoning-gym's generators.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

# Characters a token stands for, on the low side: a vocabulary of 4,096 on prose, and on odd names.
PROSE_CHARS, LIST_CHARS = 3.0, 1.9
MAX_TRIES = 4_000


class ChatTaskError(ValueError):
    """An unknown kind, a problem that does not fit, or a record that contradicts itself."""


def is_held_out(text: str) -> bool:
    """Return whether a problem or a name is held out: about one in ten, by its hash alone."""
    return hashlib.sha256(text.encode()).digest()[0] < 26


@dataclass(kw_only=True, slots=True)
class Draw:
    """What one conversation is drawn from, and the state of its simulated tools."""

    rng: Random
    held_out: bool
    level: int  # 0 short, 1 plain, 2 with a check
    budget: int | None
    passages: Sequence[str]
    tool_names: frozenset[str] = frozenset()
    store: dict[str, int] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def ours(self, make: Callable[[], Any], name: Callable[[Any], str] = str) -> Any:
        """Return the first item made whose name belongs to this conversation's side."""
        for _ in range(MAX_TRIES):
            item = make()
            if is_held_out(name(item)) == self.held_out:
                return item
        raise ChatTaskError(f"held_out: no item of this side in {MAX_TRIES}; widen the generator")

    def reason(self, short: str, plain: str, check: str = "") -> str:
        """Return the reasoning for the effort at hand."""
        return (short, plain, f"{plain}\n{check}" if check else plain)[self.level]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """A user's question and what follows; `steps` are calls with results before the answer."""

    question: str
    reasoning: str
    content: str
    answer: str
    steps: tuple[tuple[str, tuple[tuple[str, Mapping[str, Any], str], ...]], ...] = ()


# --- names -------------------------------------------------------------------------------------

_ADJECTIVES = (
    "old new red blue green small tall quiet northern southern eastern western upper lower inner "
    "outer wooden stone iron silver golden narrow wide early late second third hidden empty bright"
).split()
_NOUNS = (
    "harbor tower bridge garden mill station library market lighthouse cellar workshop ferry "
    "castle orchard museum theatre bakery stable archive chapel factory kitchen laboratory depot "
    "fountain gate hall island farm quarry school tunnel valley well yard inn court meadow pond"
).split()
_COUNTED = "code number price height weight age distance depth length score".split()
_NAMED = "colour animal metal fruit flower instrument".split()
_WORDS = {
    "colour": "red blue green yellow white black brown grey orange purple pink violet".split(),
    "animal": "fox owl bear otter heron whale horse rabbit swan wolf badger crow".split(),
    "metal": "iron copper silver gold tin lead zinc nickel bronze steel brass".split(),
    "fruit": "apple pear plum cherry grape fig lemon peach melon quince".split(),
    "flower": "rose lily tulip daisy poppy iris violet orchid aster lilac".split(),
    "instrument": "drum flute harp violin trumpet cello horn lute organ bell".split(),
}
_ITEMS = sorted({word for words in _WORDS.values() for word in words} | set(_NOUNS))
_FILLER = (
    "The morning was cold and the streets were still.",
    "Nobody knew when the next boat would come.",
    "A letter lay on the table beside the lamp.",
    "The road went down to the river and over a hill.",
    "They talked about the weather and about the harvest.",
    "Two men carried a long ladder through the door.",
    "In the evening the wind turned and the rain began.",
    "She wrote the list again and put it away.",
    "The clock struck nine and the shops were opened.",
    "It was said that the winter would be long.",
    "He walked along the wall and counted the windows.",
    "The train was late, as it often was in those days.",
)


def made_up(rng: Random) -> str:
    """Return a word of two or three syllables that means nothing."""
    count = rng.choice((2, 2, 3))
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(count))


def distinct(make: Callable[[], str], count: int) -> list[str]:
    """Return `count` different strings in the order they were made."""
    found: dict[str, None] = {}
    for _ in range(50 * count + 50):
        found.setdefault(make())
        if len(found) == count:
            return list(found)
    raise ChatTaskError(f"count: got {count}, more than there are names; ask for fewer")


def _subject(draw: Draw) -> str:
    rng = draw.rng
    return draw.ours(lambda: f"{rng.choice(_ADJECTIVES)} {rng.choice(_NOUNS)}")


def key_of_side(draw: Draw) -> str:
    """Return a made-up word of the conversation's side."""
    return draw.ours(lambda: made_up(draw.rng))


# --- retrieval ---------------------------------------------------------------------------------


def _length(draw: Draw, low: int, high: int) -> int:
    """Return a number of tokens, evenly in its logarithm, that the budget has room for."""
    length = int(low * (high / low) ** draw.rng.random())
    return length if draw.budget is None else max(40, min(length, draw.budget - 300))


def _haystack(draw: Draw, num_chars: int) -> list[str]:
    """Return sentences of neighbouring passages, about `num_chars` in all."""
    if not draw.passages:
        return [draw.rng.choice(_FILLER) for _ in range(max(1, num_chars // 46))]
    sentences, size = [], 0
    place = draw.rng.randrange(len(draw.passages))
    while size < num_chars:
        parts = re.split(r"(?<=[.!?])\s+", draw.passages[place % len(draw.passages)].strip())
        for part in parts:
            part = part[: max(0, num_chars - size)]
            if part:
                sentences.append(part)
            size += len(part) + 1
        place += 1
    return sentences


def facts_of_side(draw: Draw, count: int) -> list[tuple[str, str, str]]:
    """Return (attribute, subject, value) of different subjects and different values."""
    rng = draw.rng
    attribute = rng.choice(_COUNTED + _NAMED)
    subjects = distinct(lambda: _subject(draw), count)
    if attribute in _NAMED:
        values = rng.sample(_WORDS[attribute], count)
    else:
        values = distinct(lambda: str(rng.randrange(10, 10 ** rng.choice((2, 3, 4)))), count)
    return [(attribute, s, v) for s, v in zip(subjects, values, strict=True)]


def _passage_fact(draw: Draw, low: int, high: int, num_questions: int) -> list[Exchange]:
    rng = draw.rng
    num_questions = min(num_questions, 8)
    facts = facts_of_side(draw, max(num_questions, rng.randint(1, 5)))
    sentences = _haystack(draw, int(_length(draw, low, high) * PROSE_CHARS))
    lead = rng.choice(("", "", "Remember: ", "Note: "))
    for attribute, subject, value in facts:
        fact = f"the {attribute} of the {subject} is {value}."
        sentences.insert(rng.randint(0, len(sentences)), lead + (fact if lead else "T" + fact[1:]))
    context = " ".join(sentences)
    exchanges = []
    for attribute, subject, value in facts[:num_questions]:
        ask = f"What is the {attribute} of the {subject}?"
        if not exchanges:
            forms = (
                f"{context}\n\n{ask}",
                f"Text:\n{context}\n\nQuestion: {ask}",
                f"{ask} Here is the text.\n\n{context}",
                f"Read this and answer: {ask}\n\n{context}\n\n{ask}",
            )
            ask = rng.choice(forms)
        said = f"The {attribute} of the {subject} is {value}."
        exchanges.append(
            Exchange(
                question=ask,
                reasoning=draw.reason(
                    f"{subject}: {value}",
                    f'The text says: "{said}"',
                    f"So the answer is {value}.",
                ),
                content=said,
                answer=value,
            )
        )
    return exchanges


def _key_value_list(draw: Draw, low: int, high: int, num_questions: int) -> list[Exchange]:
    rng = draw.rng
    write = rng.choice(("{}: {}", "{} = {}", "- {}: {}", "{} -> {}"))
    # A row of a made-up key, a sign and a value is about ten tokens.
    count = max(num_questions, 2, int(_length(draw, low, high) * LIST_CHARS) // 14)
    # All names of the held-out side are few; only the asked ones have to be of this side.
    asked = distinct(lambda: key_of_side(draw), num_questions)
    others = [key for key in distinct(lambda: made_up(rng), count) if key not in asked]
    keys = asked + others[: count - num_questions]
    if rng.random() < 0.7:
        values = distinct(lambda: str(rng.randrange(10, 10_000)), len(keys))
    else:
        values = [rng.choice(_ITEMS) for _ in keys]
    table = dict(zip(keys, values, strict=True))
    rows = [write.format(key, table[key]) for key in rng.sample(keys, len(keys))]
    context = "\n".join(rows)
    exchanges = []
    for key in asked:
        ask = rng.choice(("What is the value of {}?", "Which value has {}?", "Look up {}."))
        ask = ask.format(key)
        question = ask if exchanges else rng.choice((f"{context}\n\n{ask}", f"{ask}\n\n{context}"))
        exchanges.append(
            Exchange(
                question=question,
                reasoning=draw.reason(
                    f"{key}: {table[key]}",
                    f"I look for {key}. The line is: {write.format(key, table[key])}",
                    f"So {key} has the value {table[key]}.",
                ),
                content=f"The value of {key} is {table[key]}.",
                answer=table[key],
            )
        )
    return exchanges


def _what_follows(draw: Draw, low: int, high: int, num_questions: int) -> list[Exchange]:
    rng = draw.rng
    length = _length(draw, low, high)
    if draw.passages and rng.random() < 0.5:
        return _next_words(draw, length, num_questions)
    count = max(num_questions + 2, min(400, int(length * LIST_CHARS) // 8))
    asked = distinct(lambda: key_of_side(draw), num_questions)
    others = [item for item in distinct(lambda: made_up(rng), count) if item not in asked]
    items = rng.sample(asked + others, len(asked) + len(others))
    context = rng.choice((", ", " ", "\n", "; ")).join(items)
    exchanges = []
    for item in asked:
        place = items.index(item)
        after = place == 0 or (place + 1 < len(items) and rng.random() < 0.75)
        word, step = ("after", 1) if after else ("before", -1)
        found = items[place + step]
        pair = f"{item}, {found}" if after else f"{found}, {item}"
        ask = f"What comes {word} {item}?"
        question = ask if exchanges else rng.choice((f"{context}\n\n{ask}", f"{ask}\n\n{context}"))
        exchanges.append(
            Exchange(
                question=question,
                reasoning=draw.reason(pair, f"The list has: {pair}.", f"So {found} is the answer."),
                content=f"{found}",
                answer=found,
            )
        )
    return exchanges


def _next_words(draw: Draw, length: int, num_questions: int) -> list[Exchange]:
    """Return questions for the words that follow a quotation; the quotation occurs once."""
    rng = draw.rng
    words = " ".join(_haystack(draw, int(length * PROSE_CHARS))).split()
    text = " ".join(words)
    exchanges: list[Exchange] = []
    for _ in range(200):
        if len(exchanges) == num_questions or len(words) < 20:
            break
        place = rng.randrange(len(words) - 12)
        quote = " ".join(words[place : place + 5])
        found = " ".join(words[place + 5 : place + 5 + rng.randint(3, 7)])
        if f" {text} ".count(f" {quote} ") != 1:
            continue
        ask = f"Which words follow this? {quote}"
        question = ask if exchanges else f"{text}\n\n{ask}"
        reasoning = draw.reason(f"{quote} ...", f'The text goes on: "{quote} {found}"')
        exchanges.append(
            Exchange(question=question, reasoning=reasoning, content=found, answer=found)
        )
    # A text too short or too repetitive asks for a list instead.
    plain = Draw(rng=rng, held_out=draw.held_out, level=draw.level, budget=None, passages=())
    return exchanges or _what_follows(plain, length, length + 1, num_questions)


# --- reasoning ---------------------------------------------------------------------------------


@functools.cache
def _problems(name: str, options: tuple[tuple[str, Any], ...]) -> Any:
    # By name: `make check` has no reasoning-gym to look into.
    try:
        reasoning_gym = importlib.import_module("reasoning_gym")
    except ImportError:
        remedy = "pip install 'finwhale[conversations]'"
        raise ChatTaskError(f"kind: {name} needs reasoning-gym; {remedy}") from None
    given = dict(options)
    if "transformation" in given:
        words = importlib.import_module("reasoning_gym.algorithmic.word_sorting")
        given["transformation"] = words.TextTransformation(given["transformation"])
    # The generator of item i is seeded with seed + i: items need no list of those before them.
    return reasoning_gym.create_dataset(name, seed=0, size=1 << 62, **given)


def _problem(
    draw: Draw, name: str, write: Callable[[Any], str] = lambda answer: answer, **options: Any
) -> dict[str, Any]:
    """Return a problem of this side whose answer, as `write` puts it, gets the full score."""
    problems = _problems(name, tuple(sorted(options.items())))

    def core(entry: dict[str, Any]) -> str:
        facts = entry["metadata"]
        given = (facts.get(k) for k in ("expression", "word", "span", "original_numbers"))
        rest = (facts.get(k) for k in ("original_words", "words", "sequence", "target_letter"))
        return f"{name} {[*given, *rest]}"

    entry = draw.ours(lambda: problems[draw.rng.getrandbits(60)], core)
    if problems.score_answer(write(entry["answer"]), entry) < 0.999:
        raise ChatTaskError(f"{name}: answer {entry['answer']!r} scores below 1; update its writer")
    return entry


def _exchange(
    draw: Draw, questions: Sequence[str], reasoning: str, answer: str, expected: str
) -> Exchange:
    """Return a problem's exchange; `expected` comes from reasoning-gym, `answer` from our steps."""
    if answer != expected:
        raise ChatTaskError(f"answer: steps give {answer!r}, expected {expected!r}")
    question = draw.rng.choice(list(questions))
    # One form of reply: a choice between two would be noise to a model that cannot foresee it.
    return Exchange(question=question, reasoning=reasoning, content=answer, answer=answer)


def _chain_sum(draw: Draw) -> Exchange:
    options = {"min_terms": 2, "max_terms": draw.rng.choice((2, 2, 3)), "min_digits": 1}
    entry = _problem(draw, "chain_sum", max_digits=2, **options)
    expression = entry["metadata"]["expression"]
    first, *rest = expression.split()
    total, lines, undo = int(first), [], ""
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        before, total = total, total + int(sign + term)
        lines.append(f"{before} {sign} {term} = {total}")
        undo = f"Check: {total} {'-' if sign == '+' else '+'} {term} = {before}."
    partial = ", ".join(line.split(" = ")[1] for line in lines)
    asks = (f"What is {expression}?", f"{expression} =", f"Calculate {expression}.")
    reasoning = draw.reason(partial, ". ".join(lines) + ".", undo)
    return _exchange(draw, (*asks, entry["question"]), reasoning, str(total), entry["answer"])


def _products(draw: Draw) -> Exchange:
    entry = _problem(draw, "products", min_digits=1, max_digits=2)
    expression = entry["metadata"]["expression"]
    left, right = (int(term) for term in expression.split(" * "))
    tens, ones = right - right % 10, right % 10
    plain = f"{expression} = {left * right}."
    if tens and ones:
        plain = (
            f"{left} * {tens} = {left * tens}. {left} * {ones} = {left * ones}. "
            f"{left * tens} + {left * ones} = {left * right}."
        )
    check = f"Check: {right} * {left} = {left * right}."
    asks = (f"What is {expression}?", f"{expression} =", f"Multiply {left} by {right}.")
    reasoning = draw.reason(f"{left * right}", plain, check)
    questions = (*asks, entry["question"])
    return _exchange(draw, questions, reasoning, str(left * right), entry["answer"])


def _spell_backward(draw: Draw) -> Exchange:
    entry = _problem(draw, "spell_backward", min_word_len=3, max_word_len=draw.rng.choice((4, 7)))
    word = entry["metadata"]["word"]
    there, back = " ".join(word), " ".join(reversed(word))
    asks = (f"Spell {word} backward.", f'Write the word "{word}" from back to front.')
    numbered = ", ".join(f"{i} {letter}" for i, letter in enumerate(word, 1))
    reasoning = draw.reason(back, f"{there} -> {back}", f"Letters: {numbered}.")
    questions = (*asks, entry["question"])
    return _exchange(draw, questions, reasoning, back.replace(" ", ""), entry["answer"])


def _letter_counting(draw: Draw) -> Exchange:
    entry = _problem(draw, "letter_counting", min_words=1, max_words=draw.rng.choice((2, 6)))
    letter, words = entry["metadata"]["target_letter"], entry["metadata"]["span"]
    counts = [word.lower().count(letter.lower()) for word in words]
    pairs = [f"{word} {count}" for word, count in zip(words, counts, strict=True)]
    short = [pair for pair, count in zip(pairs, counts, strict=True) if count]
    spelled = "; ".join(f"{' '.join(w)}: {c}" for w, c in zip(words, counts, strict=True))
    text = " ".join(words)
    asks = (f'How many "{letter}" are in "{text}"?', f'Count the letter {letter} in "{text}".')
    total = str(sum(counts))
    reasoning = draw.reason(
        ", ".join(short) or "none", f"{', '.join(pairs)}. Total {total}.", f"Check: {spelled}."
    )
    return _exchange(draw, (*asks, entry["question"]), reasoning, total, entry["answer"])


def _number_sorting(draw: Draw) -> Exchange:
    options = {"min_numbers": 2, "max_numbers": 6, "min_value": 0.0, "max_value": 999.0}
    entry = _problem(draw, "number_sorting", max_decimals=0, **options)
    facts = entry["metadata"]
    down = facts["direction"] == "descending"
    numbers = [int(float(number)) for number in facts["original_numbers"]]
    result = sorted(numbers, reverse=down)
    listed, answer = ", ".join(map(str, numbers)), ", ".join(map(str, result))
    first, sign = ("largest", " > ") if down else ("smallest", " < ")
    last = "smallest" if down else "largest"
    asks = (
        f"Sort from {first} to {last}: {listed}",
        f"Sort these numbers in {facts['direction']} order: {listed}",
    )
    reasoning = draw.reason(
        f"{first}: {result[0]}",
        f"The {first} is {result[0]}. Then {', '.join(map(str, result[1:]))}.",
        f"Check: {sign.join(map(str, result)) if len(set(result)) == len(result) else answer}.",
    )
    expected = ", ".join(str(int(float(number))) for number in facts["sorted_numbers"])
    return _exchange(draw, asks, reasoning, answer, expected)


def _word_sorting(draw: Draw) -> Exchange:
    options = {"min_words": 2, "max_words": 5, "max_word_length": 8, "transformation": "lowercase"}
    entry = _problem(draw, "word_sorting", **options)
    facts = entry["metadata"]
    words, down = facts["transformed_words"], facts["direction"] == "descending"
    result = sorted(words, reverse=down)
    listed, answer = ", ".join(words), ", ".join(result)
    order = "from z to a" if down else "from a to z"
    starts = ", ".join(f"{word[:2]} {word}" for word in words)
    asks = (f"Sort {order}: {listed}", f"Put these words in order {order}: {listed}")
    reasoning = draw.reason(
        f"First {result[0]}.", f"{starts}. First {result[0]}, last {result[-1]}."
    )
    return _exchange(draw, asks, reasoning, answer, entry["answer"])


def _word_reversal(draw: Draw) -> Exchange:
    entry = _problem(draw, "word_sequence_reversal", min_words=2, max_words=6)
    words = entry["metadata"]["words"]
    answer = ", ".join(reversed(words))
    numbered = ", ".join(f"{i} {word}" for i, word in enumerate(words, 1))
    listed = ", ".join(words)
    asks = (f"Reverse this list: {listed}", f"Say these words in reverse order: {listed}")
    plain = f"{numbered}. The last word, {words[-1]}, comes first."
    reasoning = draw.reason(f"{words[-1]} first", plain, f"{words[0]} comes last.")
    return _exchange(draw, asks, reasoning, answer, entry["answer"])


def _number_sequence(draw: Draw) -> Exchange:
    options = {"min_terms": 4, "max_terms": 6, "min_value": 1, "max_value": 20}
    # Rules in two steps and roundings ("halve" of 1) are open to more than one reading.
    for _ in range(MAX_TRIES):
        entry = _problem(draw, "number_sequence", max_complexity=1, **options)
        rule = entry["metadata"]["rule"]
        if re.fullmatch(r"add (previous|-?\d+)|double", rule):
            break
    *given, last = entry["metadata"]["sequence"]
    listed = ", ".join(map(str, given))
    asks = (f"What comes next? {listed}", f"Continue: {listed}, ?", entry["question"])
    if rule == "add previous":
        line = f"{given[-2]} + {given[-1]} = {given[-2] + given[-1]}."
    elif last >= given[-1]:
        line = f"{given[-1]} + {last - given[-1]} = {last}."
    else:
        line = f"{given[-1]} - {given[-1] - last} = {last}."
    reasoning = draw.reason(rule, f"Rule: {rule}. {line}", f"So {last} follows {given[-1]}.")
    return _exchange(draw, asks, reasoning, line[:-1].split(" = ")[1], entry["answer"])


# --- small talk --------------------------------------------------------------------------------

NAME = "finwhale-mini"
_TALK: tuple[tuple[str, str, str, str, str], ...] = (
    # questions | reasoning | reply | what the reply has to say | when it fits
    ("Hello|Hi|Hello there|Hey|Hi there|Good day", "A greeting.", "Hello! How can I help?", "help",
     "greeting"),
    ("Good morning", "A greeting.", "Good morning! How can I help?", "morning", "greeting"),
    ("Good evening", "A greeting.", "Good evening! How can I help?", "evening", "greeting"),
    ("How are you|How are you today|How do you do|How is it going", "A polite question.",
     "I am ready to help.", "ready", "greeting"),
    ("Thanks|Thank you|Thank you very much|Many thanks|Thanks a lot|Great, thanks", "Thanks.",
     "You're welcome.", "welcome", "greeting"),
    ("Goodbye|Bye|See you|See you later|Good night|Bye for now", "The user leaves.", "Goodbye!",
     "goodbye", "greeting"),
    ("Ok|Okay|I see|Understood|All right|Fine", "Nothing is asked.", "Good. Ask me anything.",
     "ask", "greeting"),
    ("Who are you|What are you|Please introduce yourself|What is your name|Tell me who you are|"
     "Who am I talking to|Are you a person|Are you human", "The user asks who I am.",
     f"I am {NAME}, a small test model.", NAME, "identity"),
    ("What can you do|How can you help me|What do you know|What are you good at",
     "The user asks what I can do.",
     f"I am {NAME}. I find facts in a text, do small sums and call tools.", NAME, "identity"),
    ("Who made you|Who trained you|Where do you come from", "The user asks where I come from.",
     f"I am {NAME}, trained from open text as a test of a small program.", NAME, "identity"),
    ("How large are you|Are you a large model|How many layers do you have",
     "The user asks about my size.", f"I am {NAME}: small, with 12 layers.", "12", "identity"),
)  # fmt: skip
_DEFINITIONS = {
    "river": "a stream of water that flows to a sea or a lake",
    "mountain": "a very high hill",
    "library": "a place where books are kept and lent",
    "clock": "a device that shows the time",
    "bridge": "a road over water or a valley",
    "harbor": "a place where ships are safe",
    "island": "land with water all around it",
    "whale": "a very large animal that lives in the sea",
    "prime number": "a number above 1 that only 1 and itself divide",
    "even number": "a number that 2 divides",
    "triangle": "a shape with three sides",
    "square": "a shape with four equal sides and four right angles",
    "circle": "a line whose points are all equally far from its centre",
    "token": "a piece of text that a model reads as one unit",
    "file": "a named piece of data on a computer",
    "folder": "a place for files on a computer",
    "program": "a list of instructions for a computer",
    "database": "an ordered store of data",
    "function": "a rule that gives one result for each input",
    "list": "a row of items in order",
    "winter": "the coldest season of the year",
    "summer": "the warmest season of the year",
    "week": "seven days",
    "minute": "sixty seconds",
    "century": "one hundred years",
    "dictionary": "a book that explains words",
    "baker": "a person who makes bread",
    "teacher": "a person who helps others to learn",
    "doctor": "a person who treats the sick",
    "ice": "water that is frozen",
    "steam": "water as a gas",
    "map": "a drawing of a place seen from above",
    "compass": "a device that shows north",
    "poem": "a short text in verse",
    "novel": "a long story in a book",
    "orchard": "a garden of fruit trees",
}


def _talk(draw: Draw, topic: str) -> Exchange:
    rng = draw.rng
    rows = [row for row in _TALK if row[4] == topic]

    def make() -> tuple[str, tuple[str, str, str, str, str]]:
        row = rng.choice(rows)
        text = rng.choice(row[0].split("|"))
        end = "?" if text.startswith(("How", "Who", "What", "Where", "Are")) else "."
        mark = rng.choice((end, end, "", "!" if end == "." else "??"))
        text = rng.choice((text, text.lower())) + mark
        opening = rng.choice(("", "", "Hello. ", "Hi, ", "Well, ")) if topic == "identity" else ""
        return opening + text, row

    question, row = draw.ours(make, lambda made: made[0])
    reasoning = draw.reason(row[1], f"{row[1]} A short reply is enough.")
    return Exchange(question=question, reasoning=reasoning, content=row[2], answer=row[3])


def _greeting(draw: Draw) -> Exchange:
    return _talk(draw, "greeting")


def _identity(draw: Draw) -> Exchange:
    return _talk(draw, "identity")


def _definition(draw: Draw) -> Exchange:
    forms = (
        "What is {}?|Define {}.|Explain {} in a few words.|What does {} mean?|Tell me what {} is."
    )

    def make() -> tuple[str, str]:
        term = draw.rng.choice(list(_DEFINITIONS))
        return draw.rng.choice(forms.split("|")), term

    form, term = draw.ours(make)
    text = _DEFINITIONS[term]
    named = term if term in ("ice", "steam", "winter", "summer") else f"a {term}"
    named = re.sub(r"^a (?=[aeiou])", "an ", named)
    content = f"{named[0].upper()}{named[1:]} is {text}."
    reasoning = draw.reason(f"{term}: a definition.", f"The user asks what {named} is.")
    question = form.format(named)
    return Exchange(question=question, reasoning=reasoning, content=content, answer=text)


REASONING: dict[str, Callable[[Draw], Exchange]] = {
    "chain_sum": _chain_sum,
    "products": _products,
    "spell_backward": _spell_backward,
    "letter_counting": _letter_counting,
    "number_sorting": _number_sorting,
    "word_sorting": _word_sorting,
    "word_reversal": _word_reversal,
    "number_sequence": _number_sequence,
}
SMALL_TALK: dict[str, Callable[[Draw], Exchange]] = {
    "greeting": _greeting,
    "identity": _identity,
    "definition": _definition,
}
RETRIEVAL = {
    "passage_fact": _passage_fact,
    "key_value_list": _key_value_list,
    "what_follows": _what_follows,
}
