"""Ask several questions about one long document, and see that it is computed once.

    lora-serve serve --enable-lora                # in another terminal; any model will do
    python examples/rag_prefix_cache.py

The document comes first and the question last, so all prompts begin alike. Each tenant's document
has a `cache_salt` of its own: then nobody can tell from the time of an answer what others asked.
"""

from __future__ import annotations

import argparse
import time

import httpx

DOCUMENT = " ".join(f"Section {n}: part {n} weighs {3 * n} grams." for n in range(1, 81))
QUESTIONS = ("How much does part 7 weigh?", "How much does part 60 weigh?", "Which is heaviest?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://localhost:8000", help="the server")
    parser.add_argument("--model", default=None, help="a model or an adapter")
    args = parser.parse_args()
    with httpx.Client(base_url=args.url, timeout=300) as server:
        salt = f"tenant-a-{time.time_ns()}"  # fixed for each tenant; new here, to begin uncached
        cached = [ask(server, args.model, question, salt) for question in QUESTIONS]
    assert cached[0] == 0, "the first question finds nothing"
    assert min(cached[1:]) > 0, "the others find the document"


def ask(server: httpx.Client, model: str | None, question: str, salt: str) -> int:
    """Ask, and say how many tokens of the prompt came from the cache."""
    body = {
        "model": model,
        "messages": [
            {"role": "user", "content": f"{DOCUMENT}\n\n{question}"},  # the same part first
        ],
        "max_tokens": 16,
        "cache_salt": salt,
    }
    started = time.perf_counter()
    answer = server.post("/v1/chat/completions", json=body).raise_for_status().json()
    seconds = time.perf_counter() - started
    usage = answer["usage"]
    cached = int(usage["prompt_tokens_details"]["cached_tokens"])
    print(f"{seconds:5.2f} s, {cached:5} of {usage['prompt_tokens']} tokens cached: {question}")
    return cached


if __name__ == "__main__":
    main()
