"""The tensors of an adapter's file: which module's, and whether they fit the model and the config.

All of the header is checked before a tensor is read. Knows nothing of directories.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lora_serve.adapter_checkpoint import LoRAModule, ModuleBias, RawTensor, TokenRows
from lora_serve.adapters.experts import (
    FusedLoRA,
    check_all_experts,
    experts_of,
    find_fused,
    is_of_all_experts,
    is_of_experts,
)
from lora_serve.adapters.findings import listed, shown
from lora_serve.adapters.peft_config import LoRASettings
from lora_serve.adapters.strangers import told_of_strangers
from lora_serve.adapters.tensor_file import TensorFile, TensorSpec
from lora_serve.adapters.vocabulary import (
    RowsInFile,
    check_vocabulary_bytes,
    find_rows,
    read_rows,
    surely_kept,
)
from lora_serve.model_info import Vocabulary

_TENSOR_NAME = re.compile(
    r"(?:base_model\.model\.)?(.+)\.lora_(?:([AB])\.weight|embedding_([AB]))", re.DOTALL
)

# What PEFT makes with a module's LoRA. Rows of tokens have a `base_layer`, too, which is another's.
_OWN_NAME = re.compile(
    r"(?:base_model\.model\.)?(.+?)\.(?:lora_\w+(?:\.\w+)?|(?<!\.token_adapter\.)base_layer\.\w+)",
    re.DOTALL,
)
_BIAS_OF_B = ".lora_B.bias"
_BIAS_NAME = re.compile(r"(?:base_model\.model\.)?(.+?)(\.lora_B|\.base_layer)?\.bias", re.DOTALL)

Shapes = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Adaptable:
    """What adapters may change of a model, and how much of it.

    lora_modules: (out_features, in_features) of each projection an adapter may change.
    max_lora_rank: highest rank of any module.
    vocabulary: of which rows may be changed, and to which a low-rank delta may be added; None: not.
    max_vocab_bytes: what these may take in memory; None: any.
    max_expert_rank: highest rank of experts that tokens choose; None: max_lora_rank.
    """

    lora_modules: Shapes
    max_lora_rank: int
    vocabulary: Vocabulary | None = None
    max_vocab_bytes: int | None = None
    max_expert_rank: int | None = None

    @property
    def all_modules(self) -> Shapes:
        """All projections that may be changed, the vocabulary's among them."""
        if self.vocabulary is None:
            return self.lora_modules
        return {**self.lora_modules, **self.vocabulary.lora_modules}


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """What an adapter consists of. stored_rows: all in the file, also those that change nothing.

    ignored: tensors that PEFT leaves out when it loads the file, too.
    """

    modules: tuple[LoRAModule, ...] = ()
    biases: tuple[ModuleBias, ...] = ()
    token_rows: tuple[TokenRows, ...] = ()
    stored_rows: tuple[tuple[RowsInFile, RawTensor], ...] = ()
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FoundTensors:
    """What a header says. pairs: tensors' names by module and side ("A", "B").

    biases: names of projections and whether it is lora_B's, by the tensors' names. fused: of all
    experts of a layer. ignored: names of tensors that are not among them, as in AdapterTensors.
    """

    specs: Mapping[str, TensorSpec]
    pairs: Mapping[str, Mapping[str, str]]
    biases: Mapping[str, tuple[str, bool]]
    rows: tuple[RowsInFile, ...]
    fused: tuple[FusedLoRA, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def changes_linears(self) -> bool:
        return bool(self.pairs or self.biases or self.fused)


def read_tensors(
    file: TensorFile, settings: LoRASettings, adaptable: Adaptable, findings: list[str]
) -> AdapterTensors:
    """All modules by name, or findings. Reads no tensor while there are findings."""
    found = check_tensors(file, settings, adaptable, findings)
    if found is None or findings:
        return AdapterTensors()
    tensors = file.read_tensors(found.specs, findings)
    token_rows = read_rows(found.rows, tensors, adaptable.vocabulary, findings)
    if not found.changes_linears and not token_rows:
        findings.append("its rows are the model's own: it would be that under another name")
    ranks = {name: settings.rank_of(name) for name in found.pairs}
    check_vocabulary_bytes(
        ranks, token_rows, adaptable.vocabulary, adaptable.max_vocab_bytes, findings
    )
    modules = [
        _module(name, settings, tensors[pair["A"]], tensors[pair["B"]])
        for name, pair in found.pairs.items()
    ]
    for each in found.fused:
        modules += each.split(tensors[each.tensors["A"]], tensors[each.tensors["B"]])
    return AdapterTensors(
        tuple(sorted(modules, key=lambda module: module.name)),
        tuple(
            _bias(*found.biases[name], settings, ranks, tensors[name])
            for name in sorted(found.biases)
        ),
        token_rows,
        tuple((rows, tensors[rows.tensor]) for rows in found.rows),
        found.ignored,
    )


def check_tensors(
    file: TensorFile, settings: LoRASettings, adaptable: Adaptable, findings: list[str]
) -> FoundTensors | None:
    """Check what the file's header says; what is wrong is appended to `findings`."""
    header = file.read_header(findings)
    if header is None:
        return None
    ignored = _ignored(header, settings, findings)
    specs = {name: spec for name, spec in header.items() if name not in ignored}
    rows = find_rows(specs, settings, adaptable.vocabulary, findings)
    biases = _biases(specs, adaptable.lora_modules, settings, findings)
    layers = experts_of(adaptable.lora_modules)
    fused, judged = find_fused(specs, settings, layers, findings)
    named = {*biases, *judged, *(each.tensor for each in rows)}
    pairs = _pair({n: s for n, s in specs.items() if n not in named}, adaptable, findings)
    for each in rows:
        if each.token_ids is not None and each.matrix in pairs:
            findings.append(f"{each.matrix} has LoRA and rows of some tokens; PEFT has no both")
    check_all_experts(pairs, layers, findings)
    _check_once(pairs, fused, findings)
    if not specs:
        findings.append(_nothing_left(sorted(ignored)))
    unmatchable = settings.unmatchable(len(pairs))
    findings += [
        f"{name}: its patterns are too complex to match with {len(pairs)} modules; simplify them"
        for name in unmatchable
    ]
    if unmatchable:
        return None
    ranks = {module: settings.rank_of(module) for module in pairs}
    _check_shapes(pairs, specs, ranks, adaptable.all_modules, findings)
    of_experts = [rank for name, rank in ranks.items() if is_of_experts(name)]
    of_experts += [each.rank for each in fused]
    _check_ranks([*ranks.values(), *of_experts], "max-lora-rank", adaptable.max_lora_rank, findings)
    if adaptable.max_expert_rank is not None:
        limit = adaptable.max_expert_rank
        _check_ranks(of_experts, "max-lora-expert-rank", limit, findings)
    check_vocabulary_bytes(
        ranks, surely_kept(rows), adaptable.vocabulary, adaptable.max_vocab_bytes, findings
    )
    without = sorted({n for n, is_of_b in biases.values() if is_of_b and n not in pairs})
    if without:
        findings.append(f"biases of lora_B without its weight: {listed(without)}")
    return FoundTensors(specs, pairs, biases, rows, tuple(fused), tuple(sorted(ignored)))


def _ignored(specs: Iterable[str], settings: LoRASettings, findings: list[str]) -> frozenset[str]:
    """The tensors of modules, or of biases of lora_B, that PEFT does not make by this config."""
    matches = {name: _OWN_NAME.fullmatch(name) for name in specs if not is_of_all_experts(name)}
    modules = {name: match[1] for name, match in matches.items() if match is not None}
    without = settings.targets.without_lora(set(modules.values()), findings)
    return frozenset(
        name
        for name, module in modules.items()
        if module in without or (name.endswith(_BIAS_OF_B) and not settings.lora_bias)
    )


def _nothing_left(ignored: Sequence[str]) -> str:
    if not ignored:
        return "it holds no tensor, so it would be the base model under another name"
    return (
        f"none of its {len(ignored)} tensors is of a module that its config gives LoRA (by "
        "target_modules, exclude_modules, layers_to_transform, modules_to_save or lora_bias), so "
        f"PEFT would leave them out: {listed(ignored)}"
    )


def _biases(
    specs: Mapping[str, TensorSpec],
    lora_modules: Shapes,
    settings: LoRASettings,
    findings: list[str],
) -> dict[str, tuple[str, bool]]:
    """The biases of projections, as FoundTensors has them; others are left out."""
    found: dict[str, tuple[str, bool]] = {}
    seen: set[tuple[str, bool]] = set()
    for name, spec in specs.items():
        match = _BIAS_NAME.fullmatch(name)
        if match is None or match[1] not in lora_modules or is_of_experts(match[1]):
            continue
        bias = match[1], match[2] == ".lora_B"
        if bias in seen:
            findings.append(f"the bias of {bias[0]} stands there twice")
        if spec.shape != lora_modules[bias[0]][:1]:
            findings.append(
                f"{shown(name)} has shape {spec.shape}, not {lora_modules[bias[0]][:1]}"
            )
        if settings.invocation_tokens and not bias[1]:
            findings.append(
                f"{shown(name)} would act before the invocation tokens of an activated LoRA, too; "
                "retrain with bias 'none'"
            )
        seen.add(bias)
        found[name] = bias
    return found


def _bias(
    module: str,
    is_of_b: bool,
    settings: LoRASettings,
    ranks: Mapping[str, int],
    values: RawTensor,
) -> ModuleBias:
    scale = settings.scale_of(module, ranks[module]) if is_of_b else None
    return ModuleBias(module, values, scale)


def own_shapes_of(specs: Mapping[str, TensorSpec]) -> Shapes:
    """The `lora_modules` that tensors fit, as their names and shapes say."""
    shapes: dict[str, tuple[int, int]] = {}
    for name, spec in specs.items():
        match = _TENSOR_NAME.fullmatch(name)
        bias = _BIAS_NAME.fullmatch(name)
        if bias is not None and len(spec.shape) == 1:
            shapes[bias[1]] = (spec.shape[0], shapes.get(bias[1], (0, 0))[1])
        elif match is not None and match[2] and len(spec.shape) == 2:
            num_out, num_in = shapes.get(match[1], (0, 0))
            is_a = match[2] == "A"
            shapes[match[1]] = (num_out, spec.shape[1]) if is_a else (spec.shape[0], num_in)
    return shapes


def _module(name: str, settings: LoRASettings, a: RawTensor, b: RawTensor) -> LoRAModule:
    rank = a.shape[0]  # as its settings say: the shapes were checked
    return LoRAModule(name, rank, settings.scale_of(name, rank), a, b)


def _pair(
    specs: Mapping[str, TensorSpec], adaptable: Adaptable, findings: list[str]
) -> dict[str, dict[str, str]]:
    """Tensor names by module and side ("A", "B"). Any other tensor is a finding."""
    modules, vocabulary = adaptable.all_modules, adaptable.vocabulary
    embedding = None if vocabulary is None else vocabulary.embedding
    pairs: dict[str, dict[str, str]] = {}
    strangers: dict[str, str] = {}  # the module that each is of, by its name
    for name in specs:
        match = _TENSOR_NAME.fullmatch(name)
        side = "" if match is None else match[3] if match[1] == embedding else match[2]
        if match is None or not side or match[1] not in modules:
            strangers[name] = "" if match is None else match[1]
        elif side in pairs.setdefault(match[1], {}):
            findings.append(f"lora_{side} of {match[1]} stands there twice")
        else:
            pairs[match[1]][side] = name
    if strangers:
        findings += told_of_strangers(strangers, adaptable.lora_modules, modules)
    return pairs


def _check_once(
    pairs: Mapping[str, object], fused: Sequence[FusedLoRA], findings: list[str]
) -> None:
    twice = [each.experts.name for each in fused if each.changes_any(pairs)]
    if twice:
        findings.append(f"LoRA of all experts together, and of each: {listed(twice)}")


def _check_shapes(
    pairs: Mapping[str, Mapping[str, str]],
    specs: Mapping[str, TensorSpec],
    ranks: Mapping[str, int],
    lora_modules: Shapes,
    findings: list[str],
) -> None:
    missing, misshapen = [], []
    for module, pair in sorted(pairs.items()):
        out_features, in_features = lora_modules[module]
        rank = ranks[module]
        for side, expected in (("A", (rank, in_features)), ("B", (out_features, rank))):
            if side not in pair:
                missing.append(f"{module}.lora_{side}.weight")
            elif (shape := specs[pair[side]].shape) != expected:
                misshapen.append(f"{module}.lora_{side}.weight: {shape}, not {expected}")
    if missing:
        findings.append(f"one of a pair is missing: {listed(missing)}")
    if misshapen:
        findings.append(
            f"shapes that do not fit this model and the ranks of its config: {listed(misshapen)}"
        )


def _check_ranks(ranks: Sequence[int], flag: str, limit: int, findings: list[str]) -> None:
    rank = max(ranks, default=0)
    if rank > limit:
        findings.append(
            f"LoRA rank {rank} is greater than {flag.replace('-', '_')} {limit}; raise --{flag}, "
            "or retrain"
        )
