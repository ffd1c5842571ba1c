"""What a compiled kernel touches before it waits for the kernels before it: NVIDIA's machine code.

Compilers move loads. So the code is walked as it stands, from its entry along every branch to the
first wait, and each address on the way is followed back to the parameters that it was made of. What
may be touched there is said in lora_serve/ops/triton/overlap.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

FIRST_PARAMETER = 0x210  # of sm_90, in its bank of constants
WAIT, LETS_NEXT_BEGIN = "ACQBULK", "PREEXIT"
A_WRITE, UNKNOWN, UNORDERED = "a write", "unknown memory", "what no wait orders"
OTHERS = {"EXIT": "the end", LETS_NEXT_BEGIN: "the next kernel"}

_LINE = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(@!?\w+\s+)?([A-Z][\w.]*)\s*([^;]*);", re.MULTILINE)
_REGISTER = re.compile(r"\bU?R\d+")
_PARAMETER = re.compile(r"c\[0x0\]\[0x([0-9a-f]+)\]")
_LOADS = {"LD", "LDG", "LDGSTS"}
_WRITES = re.compile(r"(ST|STG|STAS|ATOM|ATOMG|RED|REDG|SUST|SUATOM|SURED|UBLK\w+|UTMA\w+)\b")
_LEAVES_SIGHT = {"CALL", "RET", "BRX", "BRXU", "JMP", "JMX"}

# What each register was made of: names of parameters
_Origins = dict[str, frozenset[str]]
_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Instruction:
    address: int
    is_conditional: bool
    opcode: str
    operands: str

    @property
    def kind(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def label(self) -> int:
        """Where a branch leads, or where threads meet that leave a stretch of code together."""
        return int(self.operands.split()[-1], 16)


def waits(listing: str) -> bool:
    """Whether it does anywhere, or has the next kernel begin."""
    return any(found.kind in (WAIT, LETS_NEXT_BEGIN) for found in _instructions(listing))


def touched_before_wait(listing: str, parameters: Mapping[int, str]) -> frozenset[str]:
    """Names of the parameters that lead to what is read on any path, and the words above.

    Args:
        listing: what `cuobjdump -sass` says of a kernel for sm_90.
        parameters: names of pointers by their first byte among the parameters.
    """
    code = {instruction.address: instruction for instruction in _instructions(listing)}
    addresses = sorted(code)
    following = dict(pairwise(addresses))
    begun: dict[int, _Origins] = {addresses[0]: {}}
    # Such loads may take what lies in a cache since before the wait.
    touched = {UNORDERED} if any(".CONSTANT" in each.opcode for each in code.values()) else set()
    to_walk = [addresses[0]]
    while to_walk:
        here = code[to_walk.pop()]
        origins = begun[here.address]
        touched |= _touched(here, origins)
        origins = _after(here, origins, parameters)
        for address in _next(here, list(code.values()), following.get(here.address)):
            known = begun.get(address)
            merged = origins if known is None else _merged(known, origins)
            if merged != known:
                begun[address] = merged
                to_walk.append(address)
    return frozenset(touched)


def _instructions(listing: str) -> Iterator[_Instruction]:
    for address, condition, opcode, operands in _LINE.findall(listing):
        yield _Instruction(int(address, 16), bool(condition), opcode, operands.strip())


def _touched(here: _Instruction, origins: _Origins) -> frozenset[str]:
    if here.kind in _LOADS:
        (*_, where) = re.findall(r"\[([^]]*)\]", here.operands)
        made_of = (origins.get(name, _NOTHING) for name in _REGISTER.findall(where))
        return frozenset().union(*made_of) or frozenset({UNKNOWN})
    if _WRITES.match(here.opcode):
        return frozenset({A_WRITE})
    if here.kind in _LEAVES_SIGHT:
        return frozenset({UNKNOWN})
    return frozenset({OTHERS[here.kind]}) if here.kind in OTHERS else _NOTHING


def _after(here: _Instruction, origins: _Origins, parameters: Mapping[int, str]) -> _Origins:
    """What it writes is made of all that it reads; of an address its lower half is followed."""
    operands = [operand.strip() for operand in here.operands.split(",")]
    while operands and re.fullmatch(r"!?U?P(\d|T)", operands[0]):
        operands.pop(0)
    target = re.fullmatch(r"(U?R)(\d+)", operands[0]) if operands else None
    if target is None or "SETP" in here.opcode:
        return origins
    read = ", ".join(operands[1:])
    made_of = frozenset().union(
        *(origins.get(name, _NOTHING) for name in _REGISTER.findall(read)),
        *({parameters[at]} for at in _parameters(read) if at in parameters),
    )
    after = dict(origins)
    file, first = target[1], int(target[2])
    for number in range(first, first + _width(here)):
        name = f"{file}{number}"
        kept = origins.get(name, _NOTHING) if here.is_conditional else _NOTHING
        after[name] = made_of | kept
    return after


def _parameters(read: str) -> list[int]:
    return [int(at, 16) - FIRST_PARAMETER & ~7 for at in _PARAMETER.findall(read)]


def _width(here: _Instruction) -> int:
    """Width in registers of 32 bits."""
    if ".128" in here.opcode:
        return 4
    is_pair = here.opcode == "CS2R" or ".64" in here.opcode or ".WIDE" in here.opcode
    return 2 if is_pair else 1


def _next(here: _Instruction, code: Sequence[_Instruction], following: int | None) -> Iterator[int]:
    if here.kind == WAIT and not here.is_conditional:
        return
    if here.kind == "BRA":
        yield here.label
    if here.kind == "BSYNC":
        yield from (each.label for each in code if each.kind == "BSSY")
    leaves = here.kind in {"EXIT", *_LEAVES_SIGHT}
    leaves |= here.kind == "BRA" and here.operands.startswith("0x")
    if following is not None and (here.is_conditional or not leaves):
        yield following


def _merged(some: _Origins, others: _Origins) -> _Origins:
    names = some.keys() | others.keys()
    return {name: some.get(name, _NOTHING) | others.get(name, _NOTHING) for name in names}
