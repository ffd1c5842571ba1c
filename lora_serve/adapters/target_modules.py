"""Which modules PEFT gives LoRA to when it loads an adapter, as the config says.

PEFT makes the modules by the config alone and fills them from the file; a tensor of a module that
it did not make is left out. So an adapter means no more than what its config names. Expressions are
those of Python's `re`; the `regex` library matches them, since it can be told to stop.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import regex

from lora_serve.adapters.findings import shown

_MATCHING_SECONDS = 2.0  # of processor time, for all names of a file
_MAX_CHARACTERS = 16_384  # of an expression
_MAX_INDEX_DIGITS = 9
_ALL_LINEAR = "all-linear"
_MAX_NAME_CHARACTERS = 1000  # no module has a longer one; such tensors are refused elsewhere
_VOCABULARY = ("embed_tokens", "lm_head")  # the last parts of names

Names: TypeAlias = "frozenset[str] | regex.Pattern[str]"


@dataclass(frozen=True, slots=True)
class TargetModules:
    """What the config says of modules; by default that all have LoRA.

    targets: names or ends of names, or what whole names match; None: not told. excluded: the same.
    layers: numbers of those that `targets` means by ends of names; None: all. layer_lists: what the
    lists of layers are called. saved: modules that are copied, and so have no LoRA. ties: whether
    the LM head has what the embeddings have.
    """

    targets: Names | None = None
    is_all_linear: bool = False
    excluded: Names = frozenset()
    layers: frozenset[int] | None = None
    layer_lists: tuple[regex.Pattern[str], ...] = ()
    saved: tuple[str, ...] = ()
    ties: bool = False

    def without_lora(self, modules: Iterable[str], findings: list[str]) -> frozenset[str]:
        """The modules that get no LoRA; a finding, and none, where that takes too long."""
        deadline = time.thread_time() + _MATCHING_SECONDS
        try:
            return frozenset(name for name in modules if not self._has_lora(name, deadline))
        except TimeoutError:
            findings.append(
                "target_modules, exclude_modules or layers_pattern took longer than "
                f"{_MATCHING_SECONDS:g} s of processor time to match with the names of its "
                "modules; write out names"
            )
            return frozenset()

    def _has_lora(self, module: str, deadline: float) -> bool:
        if self.targets is None or len(module) > _MAX_NAME_CHARACTERS:
            return not self._is_saved(module)
        if _means(self.excluded, module, deadline) or self._is_saved(module):
            return False
        is_vocabulary = _last(module) in _VOCABULARY
        if is_vocabulary and self.ties and self._targets_vocabulary(deadline):
            return True
        if self.is_all_linear:
            return not is_vocabulary
        if isinstance(self.targets, frozenset) and module in self.targets:
            return True  # whatever its layer, as in PEFT
        return _means(self.targets, module, deadline) and self._is_in_layers(module, deadline)

    def _targets_vocabulary(self, deadline: float) -> bool:
        """Whether embeddings or LM head are meant, as PEFT looks for that."""
        assert self.targets is not None
        names = map(_last, self.targets) if isinstance(self.targets, frozenset) else _VOCABULARY
        return any(name in _VOCABULARY and _means(self.targets, name, deadline) for name in names)

    def _is_in_layers(self, module: str, deadline: float) -> bool:
        if self.layers is None:
            return True
        for pattern in self.layer_lists:
            match = pattern.match(module, timeout=_left(deadline))
            if match is not None:
                index = match["idx"] or ""  # an alternative may have none
                return 0 < len(index) <= _MAX_INDEX_DIGITS and int(index) in self.layers
        return False

    def _is_saved(self, module: str) -> bool:
        return any(f".{name}." in f".{module}." for name in self.saved)


def parse_targets(
    config: Mapping[str, object], saved: tuple[str, ...], findings: list[str]
) -> TargetModules:
    """What the config says; what PEFT would not take is appended to `findings`.

    saved: its modules_to_save.
    """
    told = config.get("target_modules")
    is_all_linear = isinstance(told, str) and told.lower() == _ALL_LINEAR
    targets = None if told is None else _names("target_modules", told, findings)
    if told is None and config.get("target_parameters"):
        targets = frozenset()  # then those alone have LoRA
    layers, lists = _layers(config, findings)
    if isinstance(told, str):
        findings += [
            f"{name} is set, and target_modules is the expression {shown(told)}, with which PEFT "
            "does not take it; name the modules in a list"
            for name in ("layers_to_transform", "layers_pattern")
            if config.get(name) is not None
        ]
    return TargetModules(
        targets=targets,
        is_all_linear=is_all_linear,
        excluded=_names("exclude_modules", config.get("exclude_modules") or [], findings),
        layers=layers,
        layer_lists=lists,
        saved=saved,
        ties=config.get("ensure_weight_tying") is True,
    )


def _layers(
    config: Mapping[str, object], findings: list[str]
) -> tuple[frozenset[int] | None, tuple[regex.Pattern[str], ...]]:
    """The numbers of layers, and what finds a module's; None and none if all layers are meant."""
    told, lists = config.get("layers_to_transform"), config.get("layers_pattern") or []
    numbers = told if isinstance(told, list) else [] if told is None else [told]
    if not all(type(number) is int for number in numbers):
        findings.append(
            f"layers_to_transform is {shown(told)}; it must be a number, a list of them, or null"
        )
        return None, ()
    if lists and told is None:
        findings.append(
            f"layers_pattern is {shown(lists)} without layers_to_transform, which PEFT does not "
            "take; set both, or none"
        )
    if not numbers:
        return None, ()
    names = [lists] if isinstance(lists, str) else lists
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        findings.append(f"layers_pattern is {shown(lists)}; it must be a name, or a list of them")
        return None, ()
    return frozenset(numbers), tuple(_lists_of_layers(names, findings))


def _lists_of_layers(names: list[str], findings: list[str]) -> Iterator[regex.Pattern[str]]:
    """What finds a layer's number in a module's name, put together as PEFT does."""
    if not names:
        yield regex.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")
    for name in names:
        if _compiled("layers_pattern", name, findings) is not None:
            whole = rf"(?:^|.*?\.){name}\.(?P<idx>\d+)\."
            pattern = _compiled("layers_pattern", whole, findings)
            if pattern is not None:
                yield pattern


def _names(setting: str, told: object, findings: list[str]) -> Names:
    if isinstance(told, str):
        return _compiled(setting, told, findings) or frozenset()
    if isinstance(told, list) and all(isinstance(name, str) for name in told):
        return frozenset(told)
    findings.append(
        f"{setting} is {shown(told)}; it must be an expression, or a list of names of modules"
    )
    return frozenset()


def _compiled(setting: str, expression: str, findings: list[str]) -> regex.Pattern[str] | None:
    if len(expression) > _MAX_CHARACTERS:
        findings.append(
            f"{setting}: an expression of {len(expression)} characters is longer than "
            f"{_MAX_CHARACTERS}; name the modules in a list"
        )
        return None
    try:
        return regex.compile(expression)
    except (regex.error, RecursionError) as error:
        findings.append(f"{setting} is {shown(expression)}, which is no expression: {error}")
        return None


def _means(names: Names, module: str, deadline: float) -> bool:
    """Whether it is one of the names, or ends in one behind a dot; or matches as a whole."""
    if isinstance(names, frozenset):
        return bool(names) and any(end in names for end in _ends(module))
    return names.fullmatch(module, timeout=_left(deadline)) is not None


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def _ends(module: str) -> Iterator[str]:
    parts = module.split(".")
    return (".".join(parts[begin:]) for begin in range(len(parts)))


def _left(deadline: float) -> float:
    left = deadline - time.thread_time()
    if left <= 0:
        raise TimeoutError
    return left
