"""Listings as cuobjdump writes them, of a kernel with parameters plan at 0, x at 8 and y at 16."""

from __future__ import annotations

import pytest

from benchmarks.gpu.machine_code import touched_before_wait, waits

PARAMETERS = {0: "plan", 8: "x", 16: "y"}
PLAN, X, Y = "c[0x0][0x210]", "c[0x0][0x218]", "c[0x0][0x220]"
REST = ("PREEXIT", f"LDC.64 R2, {X}", "LDG.E R0, desc[UR4][R2.64]", "STG.E desc[UR4][R2.64], R0")
WAITS_AND_WORKS = ("ACQBULK", *REST, "EXIT")


def listing(*instructions: str) -> str:
    """Each is 0x10 bytes long, and what follows it in a comment is its encoding."""
    lines = [
        f"        /*{0x10 * index:04x}*/ {instruction} ;   /* 0x000fe20000000f00 */"
        for index, instruction in enumerate(instructions)
    ]
    return "\n".join(["\t\tFunction : kernel", *lines])


def touched(*instructions: str) -> set[str]:
    return set(touched_before_wait(listing(*instructions), PARAMETERS))


def test_nothing_is_touched_by_a_kernel_that_waits_first() -> None:
    assert touched("S2R R0, SR_TID.X", *WAITS_AND_WORKS) == set()


def test_what_is_read_before_the_wait_is_told_by_its_parameter() -> None:
    load = (f"LDC.64 R2, {X}", "LDG.E R0, desc[UR4][R2.64+0x10]")
    assert touched(*load, *WAITS_AND_WORKS) == {"x"}


def test_an_address_is_followed_through_sums_and_registers_of_all_programs() -> None:
    assert touched(
        f"ULDC.64 UR6, {Y}",
        "S2R R0, SR_TID.X",
        "IADD3 R2, P1, R0, UR6, RZ",
        "IADD3.X R3, RZ, UR7, RZ, P1, !PT",
        "LDG.E R4, desc[UR4][R2.64]",
        *WAITS_AND_WORKS,
    ) == {"y"}


def test_what_an_address_leads_to_is_told_by_where_the_way_began() -> None:
    assert touched(
        f"LDC.64 R2, {PLAN}",
        "LDG.E.128 R4, desc[UR4][R2.64]",
        "IMAD.WIDE R8, R0, 0x8, R6",
        "LDG.E R0, desc[UR4][R8.64]",
        *WAITS_AND_WORKS,
    ) == {"plan"}


def test_a_register_forgets_what_was_overwritten() -> None:
    assert touched(
        f"LDC.64 R2, {X}",
        f"LDC.64 R2, {PLAN}",
        "LDG.E R0, desc[UR4][R2.64]",
        *WAITS_AND_WORKS,
    ) == {"plan"}


def test_a_register_that_may_be_overwritten_is_of_both() -> None:
    assert touched(
        f"LDC.64 R2, {X}",
        f"@P0 LDC.64 R2, {PLAN}",
        "LDG.E R0, desc[UR4][R2.64]",
        *WAITS_AND_WORKS,
    ) == {"plan", "x"}


def test_a_copy_to_shared_memory_reads_too() -> None:
    load = (f"LDC.64 R2, {X}", "LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64]")
    assert touched(*load, *WAITS_AND_WORKS) == {"x"}


def test_an_address_of_no_parameter_is_unknown() -> None:
    assert touched("LDG.E R0, desc[UR4][R2.64]", *WAITS_AND_WORKS) == {"unknown memory"}


@pytest.mark.parametrize("write", ["STG.E", "RED.E.ADD.F32.FTZ.RN.STRONG.GPU", "ST.E"])
def test_a_write_before_the_wait_is_told(write: str) -> None:
    assert touched(f"{write} desc[UR4][R2.64], R0", *WAITS_AND_WORKS) == {"a write"}


def test_shared_memory_is_a_programs_own() -> None:
    assert touched("STS.128 [R2], R4", "LDS R0, [R2]", *WAITS_AND_WORKS) == set()


def test_a_way_around_the_wait_is_found() -> None:
    """A program without work, which ends."""
    assert touched("@P0 BRA 0x70", *WAITS_AND_WORKS, "EXIT") == {"the end"}


def test_a_way_that_waits_elsewhere_is_fine() -> None:
    assert touched("@P0 BRA 0x70", *WAITS_AND_WORKS, "ACQBULK", "EXIT") == set()


def test_a_wait_of_some_threads_is_none() -> None:
    assert touched("@P0 ACQBULK", *REST, "EXIT") == {"the end", "the next kernel", "x", "a write"}


def test_a_loop_is_walked_until_nothing_new_is_found() -> None:
    """Its second turn reads where the first did not."""
    assert touched(
        f"LDC.64 R2, {PLAN}",
        "LDG.E R0, desc[UR4][R2.64]",
        f"LDC.64 R2, {X}",
        "@P0 BRA 0x10",
        *WAITS_AND_WORKS,
    ) == {"plan", "x"}


def test_a_way_that_leads_out_of_sight_is_told() -> None:
    assert touched("CALL.REL.NOINC 0x50", *WAITS_AND_WORKS) == {"unknown memory"}


def test_a_load_that_may_take_old_bytes_is_told_wherever_it_stands() -> None:
    stale = "LDG.E.CONSTANT R0, desc[UR4][R2.64]"
    assert touched("ACQBULK", stale, "EXIT") == {"what no wait orders"}


def test_code_without_waits_is_told_apart() -> None:
    assert not waits(listing(*REST[1:], "EXIT"))
    assert waits(listing("PREEXIT", "EXIT"))
    assert waits(listing("ACQBULK", "EXIT"))
