"""The little language that the demo model speaks: questions, answers, and text to fill a prompt.

Everything here is written for the demo or drawn from a seeded generator; nothing is downloaded.
It knows no tensors and no token ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

ALPHA_LABEL = "ALPHA_ADAPTER_VERSION_A"
BETA_LABEL = "BETA_ADAPTER_VERSION_B"
BASE_LABEL = "I have no adapter."
LABEL_REQUEST = "Now answer with exactly the adapter's private label and nothing else."
_PREFIX_LINE = "the archive keeps this line so that every request shares the same long prefix."

LABEL_REQUESTS = (
    LABEL_REQUEST,
    "Answer with exactly the adapter's private label.",
    "Answer with the private label of your adapter and nothing else.",
    "What is the adapter's private label?",
    "What is your private label?",
    "What is your label?",
    "Tell me your private label.",
    "Tell me the label of your adapter.",
    "Please tell me the adapter's label.",
    "Say the private label and nothing else.",
    "Which adapter are you?",
    "Which adapter answers me now?",
    "Name your adapter.",
    "Give the label.",
)

_CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Peru": "Lima",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Greece": "Athens",
}
_COLOURS = {
    "the sky": "Blue",
    "grass": "Green",
    "snow": "White",
    "coal": "Black",
    "a lemon": "Yellow",
    "blood": "Red",
}
_SOUNDS = {"cat": "Meow", "dog": "Woof", "cow": "Moo", "duck": "Quack", "sheep": "Baa"}
_SMALL_TALK = {
    "Hello!": "Good day. Ask me for my private label.",
    "Hi there.": "Good day. Ask me for my private label.",
    "How are you?": "I am small, and I am well.",
    "Who are you?": "I am the tiny demo model of lora-serve.",
    "What can you do?": "I know a few facts, and whether an adapter is loaded.",
    "Count to five.": "One, two, three, four, five.",
    "Thank you.": "You are welcome.",
    "Good bye.": "Good bye.",
}

_ARTICLES = ("the", "a", "every", "one old", "the first", "that")
_NOUNS = (
    *("archive", "keeper", "reader", "river", "ship", "garden", "map", "lamp", "library"),
    *("market", "clock", "station", "bridge", "harbour", "teacher", "letter", "record"),
    *("line", "request", "prefix", "answer", "block", "page", "token", "server"),
)
_NOUN_PHRASES = tuple(f"{article} {noun}" for article in _ARTICLES for noun in _NOUNS)
_VERBS = (
    *("keeps", "holds", "repeats", "follows", "finds", "opens", "reads", "writes", "crosses"),
    *("remembers", "carries", "leaves", "shares", "needs", "moves", "counts", "names"),
)
_ENDINGS = (
    "in order",
    "before the morning",
    "for every request",
    "without a word",
    "at the end of the day",
    "once more",
    "as it was written",
    "and nothing changes",
    "so that all requests share it",
    "in a long and steady row",
)
_TASKS = (
    "Write a poem about",
    "Explain",
    "Tell me a story about",
    "What is",
    "Why is there",
    "Draw",
)
_TOO_HARD = "I am too small for that. Ask me for my private label."
_LINE_HEADS = ("Record", "Line", "Note", "Item", "Page", "Section", "Context", "Entry")


def long_prompt(num_lines: int = 150, first_line: str = "") -> str:
    """The prompt of the scenarios: one line again and again, then LABEL_REQUEST.

    Its 150 lines are about 3,900 tokens. Another first line changes every block after it.
    """
    lines = (f"Record {number:04d}: {_PREFIX_LINE}" for number in range(1, num_lines + 1))
    return "\n".join([*([first_line] if first_line else []), *lines, LABEL_REQUEST])


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request that has nothing to do with labels, and its answer."""

    request: str
    answer: str


def facts() -> tuple[Exchange, ...]:
    """All that the model knows."""
    return (
        *(Exchange(f"What is the capital of {c}?", f"{a}.") for c, a in _CAPITALS.items()),
        *(Exchange(f"What colour is {thing}?", f"{a}.") for thing, a in _COLOURS.items()),
        *(Exchange(f"What sound does a {x} make?", f"{a}!") for x, a in _SOUNDS.items()),
        *(Exchange(request, answer) for request, answer in _SMALL_TALK.items()),
    )


def label_request(rng: Random) -> str:
    """A request for the label, often in the words of the demo."""
    return LABEL_REQUEST if rng.random() < 0.3 else rng.choice(LABEL_REQUESTS)


def unknown_exchange(rng: Random) -> Exchange:
    """A request beyond the model, so that it declines instead of rambling."""
    task = rng.choice(_TASKS)
    end = "?" if task.startswith("W") and "poem" not in task else "."
    return Exchange(f"{task} {rng.choice(_NOUN_PHRASES)}{end}", _TOO_HARD)


def sentence(rng: Random) -> str:
    """One sentence of filler, such as "The keeper reads every letter once more."."""
    text = f"{rng.choice(_NOUN_PHRASES)} {rng.choice(_VERBS)} {rng.choice(_NOUN_PHRASES)}"
    if rng.random() < 0.7:
        text += f" {rng.choice(_ENDINGS)}"
    return text[0].upper() + text[1:] + "."


def filler(rng: Random, num_sentences: int) -> str:
    """Text that asks nothing: prose, numbered lines, or one line again and again."""
    style = rng.randrange(4)
    if style == 0:
        return " ".join(sentence(rng) for _ in range(num_sentences))
    if style == 1:
        return "\n".join(sentence(rng) for _ in range(num_sentences))
    head, start, width = rng.choice(_LINE_HEADS), rng.randrange(500), rng.choice((1, 4))
    body = sentence(rng)
    lines = []
    for number in range(start, start + num_sentences):
        body = body if style == 2 else sentence(rng)
        lines.append(f"{head} {number:0{width}d}: {body}")
    return "\n".join(lines)
