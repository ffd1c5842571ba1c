from __future__ import annotations

from itertools import product

from lora_serve.chat.call_ids import CallIds


def test_ids_are_a_function_of_prompt_choice_index_and_name() -> None:
    def ids() -> list[str]:
        return [
            CallIds(prompt, are_short=False).id_of(choice, index, name)
            for prompt, choice, index, name in product(((1,), (1, 2)), (0, 1), (0, 1), ("f", "g"))
        ]

    assert ids() == ids()
    assert len(set(ids())) == 16
    assert all(call_id.startswith("call_") and len(call_id) == 29 for call_id in ids())


def test_short_ids_are_nine_letters_and_digits() -> None:
    ids = {CallIds((1,), are_short=True).id_of(0, index, "f") for index in range(100)}
    assert len(ids) == 100
    assert all(len(call_id) == 9 and call_id.isascii() and call_id.isalnum() for call_id in ids)
