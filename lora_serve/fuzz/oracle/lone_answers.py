"""What a cold server of the oracle's model, alone with a request, gives: pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lora_serve.fuzz.oracle.content import (
    EOS,
    VOCAB_SIZE,
    allowed_tokens,
    bad_ends,
    chosen_token,
    drawn_token,
    hidden_sums,
    is_token_left,
    next_content,
    scored_token,
    start_content,
)
from lora_serve.fuzz.oracle.grammars import allowed_next
from lora_serve.messages import NO_RULES, TokenRules
from lora_serve.pooling import PoolingParams
from lora_serve.step import TokenLogprobs
from lora_serve.structured_outputs import ReasoningTokens, StructuredOutput


def prompt_contents(
    prompt: Sequence[int],
    digest: bytes,
    embeds_rows: Sequence[bytes] = (),
    num_groups: int = 1,
    invocation: Sequence[int] = (),
) -> Iterator[list[bytes]]:
    """The contents of each position of a prompt, one for each group.

    invocation: the adapter's invocation tokens.
    """
    start = invoked_at(prompt, invocation)
    contents = [start_content(group) for group in range(num_groups)]
    for position, token_id in enumerate(prompt):
        row = embeds_rows[position] if position < len(embeds_rows) else b""
        acting = digest if position >= start else b""
        contents = [next_content(content, token_id, row, acting) for content in contents]
        yield contents


def invoked_at(prompt: Sequence[int], invocation: Sequence[int]) -> int:
    """Where the invocation tokens, which the prompt holds, begin for the last time; 0 for none."""
    return max(_places(prompt, invocation)) if invocation else 0


def holds(prompt: Sequence[int], invocation: Sequence[int]) -> bool:
    return bool(_places(prompt, invocation))


def _places(prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    places = range(len(prompt) + 1 - len(tokens))
    return [place for place in places if [*prompt[place : place + len(tokens)]] == [*tokens]]


def lone_prompt_logprobs(
    prompt: Sequence[int],
    digest: bytes,
    start: int,
    num_groups: int = 1,
    invocation: Sequence[int] = (),
) -> list[TokenLogprobs]:
    """The prompt logprobs that a cold server, alone with this request, gives."""
    all_contents = list(prompt_contents(prompt, digest, (), num_groups, invocation))
    return [*map(scored_token, prompt[start + 1 :], all_contents[start:])]


def lone_answer(
    prompt: Sequence[int],
    digest: bytes,
    max_tokens: int,
    embeds_rows: Sequence[bytes] = (),
    num_groups: int = 1,
    constraint: StructuredOutput | None = None,
    rules: TokenRules = NO_RULES,
    reasoning: ReasoningTokens | None = None,
    invocation: Sequence[int] = (),
    budget: int | None = None,
) -> list[int]:
    """What a cold server, alone with this request, answers.

    budget: the most tokens of its reasoning. Where the grammar and the rules leave no token, the
    answer is what there is by then.
    """
    may_begin = reasoning is not None and not reasoning.is_open
    held: list[int] | None = None if reasoning and reasoning.is_open else []  # None: it reasons
    *_, contents = prompt_contents(prompt, digest, embeds_rows, num_groups, invocation)
    answer: list[int] = []
    num_thought = 0
    by_client = None if rules.allowed is None else allowed_tokens(rules.allowed)
    while len(answer) < max_tokens:
        allowed = by_client
        if constraint is not None and held is not None:
            by_grammar = allowed_next(constraint, held, VOCAB_SIZE, EOS)
            if by_grammar is None:
                break
            allowed = [one for one in by_grammar if allowed is None or one in allowed]
        banned = bad_ends(rules.bad_words, answer)
        if reasoning and held is None and num_thought == budget:
            allowed, banned = [reasoning.end], set()
        if not is_token_left(allowed, banned):
            break
        if reasoning and may_begin and not answer and allowed is not None:
            begins = by_client is None or reasoning.start in by_client
            allowed = sorted({*allowed, *([reasoning.start] if begins else ())})
        answer.append(chosen_token(drawn_token(contents), allowed, banned))
        if answer[-1] == EOS:
            break
        num_thought += held is None
        held = _held_after(held, answer, reasoning)
        contents = [next_content(content, answer[-1], b"", digest) for content in contents]
    return answer


def _held_after(
    held: list[int] | None, answer: Sequence[int], reasoning: ReasoningTokens | None
) -> list[int] | None:
    """What a grammar holds once the answer has another token; None while it reasons."""
    if reasoning and held is None:
        return [] if answer[-1] == reasoning.end else None
    if reasoning and not reasoning.is_open and [*answer] == [reasoning.start]:
        return None
    return None if held is None else [*held, answer[-1]]


def lone_pooled(
    prompt: Sequence[int],
    digest: bytes,
    pooling: PoolingParams,
    embeds_rows: Sequence[bytes] = (),
    num_groups: int = 1,
    invocation: Sequence[int] = (),
) -> bytes:
    """What a cold server, alone with this request, makes an embedding of."""
    rows = list(prompt_contents(prompt, digest, embeds_rows, num_groups, invocation))
    if pooling.pooling_type == "MEAN":
        return hidden_sums(rows)
    asked = rows if pooling.pooling_type == "ALL" else rows[-1:]
    return b"".join(map(b"".join, asked))
