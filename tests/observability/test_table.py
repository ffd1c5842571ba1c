from __future__ import annotations

from lora_serve.observability.table import text_table


def test_a_table_aligns_names_left_and_figures_right() -> None:
    assert text_table(("ms", "mean"), [("long name", "1.0"), ("x", "12.5")]) == (
        "ms         mean\nlong name   1.0\nx          12.5"
    )


def test_other_columns_of_words_are_aligned_left() -> None:
    table = text_table(("name", "n", "path"), [("a", "10", "/a"), ("b", "5", "/b/c")], (0, 2))
    assert table == "name   n  path\na     10  /a\nb      5  /b/c"
