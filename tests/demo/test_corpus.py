from __future__ import annotations

from random import Random

from lora_serve.demo import corpus


def test_the_long_prompt_ends_with_the_request_of_the_report() -> None:
    prompt = corpus.long_prompt()
    assert prompt.endswith(
        "\nNow answer with exactly the adapter's private label and nothing else."
    )
    assert prompt == corpus.long_prompt()


def test_another_first_line_comes_before_everything_else() -> None:
    assert corpus.long_prompt(first_line="Hear, hear.") == f"Hear, hear.\n{corpus.long_prompt()}"


def test_filler_never_speaks_of_labels() -> None:
    rng = Random(0)
    texts = [corpus.filler(rng, 8) for _ in range(200)]
    assert not any("label" in text.lower() or "ADAPTER" in text for text in texts)


def test_the_same_seed_writes_the_same_text() -> None:
    assert corpus.filler(Random(3), 20) == corpus.filler(Random(3), 20)
    assert corpus.filler(Random(3), 20) != corpus.filler(Random(4), 20)
