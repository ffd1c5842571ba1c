from __future__ import annotations

from dataclasses import replace

from lora_serve.demo.recipe import Recipe


def test_every_number_changes_the_name() -> None:
    assert Recipe().name == Recipe().name
    changed = {replace(Recipe(), seed=9).name, replace(Recipe(), model_steps=361).name}
    assert len({Recipe().name, *changed}) == 3


def test_the_name_is_fit_for_a_path() -> None:
    assert len(Recipe().name) == 16
    assert Recipe().name.isalnum()
