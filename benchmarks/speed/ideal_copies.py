"""What a drafter could save at most that copies from texts: counted, not timed.

The ideal one knows at each step which place of the texts to copy from, which no drafter does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from lora_serve.step import num_same


def fewest_steps(
    prompt: Sequence[int], answer: Sequence[int], others: Sequence[Sequence[int]], most: int
) -> int:
    """How many steps give the tokens behind an answer's first, copying up to `most` in each.

    others: answers that run beside this one, of which as many tokens are known.
    """
    texts = [[*prompt, *answer], *others]
    places: list[defaultdict[int, list[int]]] = []
    for text in texts:
        of_token: defaultdict[int, list[int]] = defaultdict(list)
        for place, token_id in enumerate(text):
            of_token[token_id].append(place)
        places.append(of_token)
    num_drawn, num_steps = 1, 0
    while num_drawn < len(answer):
        ahead = answer[num_drawn : num_drawn + most]
        copied = 0
        for index, text in enumerate(texts):
            end = num_drawn + (0 if index else len(prompt))
            for place in places[index][ahead[0]]:
                if place >= end:
                    break
                copied = max(copied, num_same(text[place : min(end, place + most)], ahead))
        num_drawn += copied + 1
        num_steps += 1
    return num_steps
