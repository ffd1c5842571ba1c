import pytest

from benchmarks.common.page import marks, replace_between_marks


def test_the_table_goes_between_its_marks_and_nothing_else_changes() -> None:
    begin, end = marks("peers")
    page = f"before\n{begin}\nold\n{end}\nafter\n"
    assert replace_between_marks(page, "peers", "new\n") == f"before\n{begin}\nnew\n{end}\nafter\n"
    with pytest.raises(ValueError, match="no <!-- clients: begin"):
        replace_between_marks(page, "clients", "new\n")
