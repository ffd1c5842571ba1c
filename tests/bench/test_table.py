from __future__ import annotations

from lora_serve.bench.table import text_table


def test_a_table_aligns_names_left_and_figures_right() -> None:
    assert text_table(("ms", "mean"), [("long name", "1.0"), ("x", "12.5")]) == (
        "ms         mean\nlong name   1.0\nx          12.5"
    )
