"""LoRA on the experts of a layer, as PEFT stores it of all of them together.

With `target_parameters` PEFT trains what transformers keeps of all E experts of a layer in one
parameter: `gate_up_proj` (E, 2 inner, hidden) and `down_proj` (E, hidden, inner). It stores

    lora_A (E * rank, in): expert e has the rows from e * rank on
    lora_B (out, rank * E): expert e has every E-th column, the first of them e

and, of versions before 0.19.1, A with what is given and B with what is taken, each other's
transpose. A second parameter of the module is wrapped around the first, whose tensors are then
`experts.base_layer`'s. What is read is each expert's own, under the names of its projections.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lora_serve.adapter_checkpoint import LoRAModule, RawTensor
from lora_serve.adapters.findings import listed
from lora_serve.adapters.peft_config import LoRASettings
from lora_serve.adapters.tensor_file import TensorSpec, bits_of

GATE_UP, DOWN = "gate_up_proj", "down_proj"  # in the order in which PEFT wraps them
PARAMETERS = (GATE_UP, DOWN)

_FUSED_NAME = re.compile(
    r"(?:base_model\.model\.)?(.+\.experts)(\.base_layer)?\.lora_([AB])\.weight", re.DOTALL
)
_EXPERT_NAME = re.compile(r"(.+\.experts)\.([0-9]{1,4})\..+", re.DOTALL)
_MIXTRALS = ("w1", "w3", "w2")
_PROJECTIONS = (
    ("gate_proj", "up_proj", "down_proj"),
    _MIXTRALS,
    ("gate_up_proj.even", "gate_up_proj.odd", "down_proj"),  # gpt-oss's, whose outputs take turns
)
_OLD_MODULE, _MODULE = ".block_sparse_moe.", ".mlp."  # Mixtral's, in checkpoints and in PEFT
_SIDES_SINCE = (0, 19, 1)
_SIDES_OF_JOINT = (0, 19, 0)  # the one version that swapped gpt-oss's
_MOST_EXPERTS = 1024  # of which a file alone is believed


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """The experts of one layer.

    name: of them all in the checkpoint. projections: what gate, up and down are called.
    """

    name: str
    count: int
    projections: tuple[str, str, str]
    hidden_size: int
    inner: int

    @property
    def take_turns(self) -> bool:
        """Whether gate's and up's outputs do, in a parameter (E, hidden, 2 inner)."""
        return self.projections[0].endswith(".even")

    def sizes(self, parameter: str) -> tuple[int, int]:
        """(out_features, in_features) of one expert's part of a parameter."""
        if parameter == GATE_UP:
            return 2 * self.inner, self.hidden_size
        return self.hidden_size, self.inner

    def modules(self, projection: str) -> list[str]:
        """The names of one projection of all experts, in their order."""
        return [f"{self.name}.{expert}.{projection}" for expert in range(self.count)]


@dataclass(frozen=True, slots=True)
class FusedLoRA:
    """The LoRA of one parameter. tensors: names by side ("A", "B").

    is_swapped: whether A has what is given, as PEFT had it.
    """

    experts: LayerExperts
    parameter: str
    rank: int
    scale: float
    tensors: Mapping[str, str]
    is_swapped: bool

    def changes_any(self, modules: Mapping[str, object]) -> bool:
        """Whether some of these names of projections are of what it changes."""
        gate, up, down = self.experts.projections
        projections = (gate, up) if self.parameter == GATE_UP else (down,)
        return any(name in modules for each in projections for name in self.experts.modules(each))

    def split(self, a: RawTensor, b: RawTensor) -> Iterator[LoRAModule]:
        """Each expert's own LoRA of each projection; gate and up share A."""
        count, rank, layer = self.experts.count, self.rank, self.experts
        rows = bits_of(a).reshape(count, rank, -1)
        columns = bits_of(b).reshape(-1, rank, count)
        dtypes = a.dtype, b.dtype
        if self.is_swapped:
            all_a, all_b = columns.transpose(2, 1, 0), rows.transpose(0, 2, 1)
            dtypes = b.dtype, a.dtype
        else:
            all_a, all_b = rows, columns.transpose(2, 0, 1)
        all_a, all_b = np.ascontiguousarray(all_a), np.ascontiguousarray(all_b)
        gate, up, down = layer.projections
        places = {down: slice(0, layer.hidden_size)}
        if self.parameter == GATE_UP:
            places = {gate: slice(0, layer.inner), up: slice(layer.inner, None)}
            if layer.take_turns:
                places = {gate: slice(0, None, 2), up: slice(1, None, 2)}
        for projection, outputs in places.items():
            for name, own_a, own_b in zip(layer.modules(projection), all_a, all_b, strict=True):
                parts = own_a, np.ascontiguousarray(own_b[outputs])
                yield LoRAModule(name, rank, self.scale, *map(_raw, dtypes, parts))


def experts_of(lora_modules: Mapping[str, tuple[int, int]]) -> dict[str, LayerExperts]:
    """Each layer's experts that adapters may change, by their name in PEFT."""
    numbers: dict[str, int] = {}
    for name in lora_modules:
        match = _EXPERT_NAME.fullmatch(name)
        if match is not None:
            numbers[match[1]] = max(numbers.get(match[1], 0), int(match[2]))
    found = {}
    for name, last in numbers.items():
        if last >= _MOST_EXPERTS:
            continue
        for projections in _PROJECTIONS:
            if f"{name}.0.{projections[0]}" in lora_modules:
                inner, hidden_size = lora_modules[f"{name}.0.{projections[0]}"]
                experts = LayerExperts(name, last + 1, projections, hidden_size, inner)
                is_old = projections == _MIXTRALS
                found[name.replace(_OLD_MODULE, _MODULE) if is_old else name] = experts
    return found


def is_of_all_experts(name: str) -> bool:
    """Whether a tensor is, as its name says, LoRA of all experts of a layer together."""
    return _FUSED_NAME.fullmatch(name) is not None


def is_of_experts(name: str) -> bool:
    """Whether a module or a tensor is, as its name says, one of experts that tokens choose."""
    return ".experts." in name


def find_fused(
    specs: Mapping[str, TensorSpec],
    settings: LoRASettings,
    layers: Mapping[str, LayerExperts],
    findings: list[str],
) -> tuple[list[FusedLoRA], set[str]]:
    """What is stored of all experts together, and the tensors that it is, or that do not fit.

    What does not fit is appended to `findings`.
    """
    stored = _stored(specs, layers)
    if stored and not settings.target_parameters:
        findings.append(
            "it has LoRA of all experts together, and no target_parameters that say of what: "
            f"{listed(sorted(stored))}"
        )
        return [], set(stored.values())
    found: list[FusedLoRA] = []
    judged: set[str] = set()
    missing: list[str] = []
    misshapen: list[str] = []
    for module, experts in layers.items():
        for wrapper, parameter in _wrappers(settings, module).items():
            names = {side: stored.get(f"{module}{wrapper}.lora_{side}") for side in "AB"}
            tensors = {side: name for side, name in names.items() if name is not None}
            missing += [f"{module}{wrapper}.lora_{s}.weight" for s in "AB" if s not in tensors]
            judged.update(tensors.values())
            if len(tensors) == 2:
                one = _fitting(experts, f"{module}.{parameter}", tensors, specs, settings)
                if isinstance(one, FusedLoRA):
                    found.append(one)
                else:
                    misshapen.append(one)
    if missing:
        findings.append(f"LoRA of all experts together is incomplete: {listed(missing)}")
    if misshapen:
        findings.append(f"LoRA of all experts together does not fit: {listed(misshapen)}")
    return found, judged


def check_all_experts(
    modules: Mapping[str, object], layers: Mapping[str, LayerExperts], findings: list[str]
) -> None:
    """Find projections that an adapter changes of some experts of a layer, and not of all.

    modules: the names of projections that an adapter stores each by itself.
    """
    incomplete = []
    for experts in layers.values():
        for projection in experts.projections:
            names = experts.modules(projection)
            missing = [name for name in names if name not in modules]
            if 0 < len(missing) < len(names):
                incomplete += missing
    if incomplete:
        findings.append(f"LoRA of some experts of a layer, without others: {listed(incomplete)}")


def _stored(specs: Mapping[str, TensorSpec], layers: Mapping[str, LayerExperts]) -> dict[str, str]:
    """The tensors of all experts of layers, by what they are without a prefix."""
    matches = ((name, _FUSED_NAME.fullmatch(name)) for name in specs)
    return {
        f"{match[1]}{match[2] or ''}.lora_{match[3]}": name
        for name, match in matches
        if match is not None and match[1] in layers
    }


def _wrappers(settings: LoRASettings, module: str) -> dict[str, str]:
    """The parameters that have LoRA, by what is between the module and its tensors' names."""
    names = [each for each in PARAMETERS if settings.targets_parameter(f"{module}.{each}")]
    wrappers = [".base_layer", ""] if len(names) == 2 else [""]
    return dict(zip(wrappers, names, strict=False))


def _fitting(
    experts: LayerExperts,
    parameter: str,
    tensors: Mapping[str, str],
    specs: Mapping[str, TensorSpec],
    settings: LoRASettings,
) -> FusedLoRA | str:
    """The LoRA of a parameter, whose whole name it is; else what does not fit."""
    rank = settings.rank_of(parameter)
    kind = parameter.rpartition(".")[2]
    out, into = experts.sizes(kind)
    columns = experts.count * rank
    shapes = specs[tensors["A"]].shape, specs[tensors["B"]].shape
    is_swapped = shapes == ((columns, out), (into, columns))
    if not is_swapped and shapes != ((columns, into), (out, columns)):
        return (
            f"{parameter}: {shapes[0]} and {shapes[1]}, not {(columns, into)} and {(out, columns)}"
        )
    version = settings.peft_version
    if out == into and experts.take_turns:
        is_swapped = version == _SIDES_OF_JOINT
    elif out == into:
        if version is None:
            return f"{parameter}: without peft_version in the config nobody knows which side A has"
        is_swapped = version < _SIDES_SINCE
    scale = settings.scale_of(parameter, rank)
    return FusedLoRA(experts, kind, rank, scale, tensors, is_swapped)


def _raw(dtype: str, values: npt.NDArray[np.unsignedinteger]) -> RawTensor:
    return RawTensor(dtype, values.shape, memoryview(values.data).cast("B").toreadonly())
