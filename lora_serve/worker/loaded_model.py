"""A model on its device, with the kernels that run it. Knows nothing of steps or of the KV pool."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lora_serve.config import ModelConfig
from lora_serve.config.model import RANDOM_WEIGHTS
from lora_serve.config.overrides import REFERENCE, refuse_reference_sums
from lora_serve.config.parallel import WHOLE_ROWS, Reduce
from lora_serve.distributed.agreement import least
from lora_serve.distributed.group import ALONE, ROOT, Group
from lora_serve.distributed.shares import place_of
from lora_serve.gguf.header import forget_header
from lora_serve.model_info import Vocabulary
from lora_serve.models.base import Model, ModelSpec
from lora_serve.models.choices import dtype_name, max_model_len
from lora_serve.models.fingerprint import model_fingerprint
from lora_serve.models.kept_weights.loading import Loading
from lora_serve.models.source import check_quantization, load_spec, model_path
from lora_serve.models.weights import TensorSource, WeightReader, open_weights
from lora_serve.ops.contract import Ops
from lora_serve.ops.quantization import FORMATS, Quantization
from lora_serve.ops.select import choose_ops, machine_numerics, quantize_linears
from lora_serve.sampling.contract import Sampler
from lora_serve.sampling.follower import FollowingSampler
from lora_serve.sampling.lm_head_screening import LMHeadScreening, with_screening
from lora_serve.sampling.logprobs_mode import LogprobsMode
from lora_serve.sampling.select import select_sampler
from lora_serve.worker.device import Device
from lora_serve.worker.first_calls import call_functions_once
from lora_serve.worker.kv_cache import kv_block_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """screening: of the LM head, where it is screened. fingerprint: as in ModelInfo.

    vocabulary: of the spec, with its dtype and digests. biases: all, whole, float32, on the CPU, by
    their names. weights: their format, for people.
    """

    device: Device
    ops: Ops
    spec: ModelSpec
    dtype: torch.dtype
    max_model_len: int
    model: Model
    sampler: Sampler
    screening: LMHeadScreening | None
    fingerprint: bytes
    vocabulary: Vocabulary | None
    biases: Mapping[str, torch.Tensor]
    weights: str


def load_model(
    config: ModelConfig,
    device: Device,
    block_size: int,
    group: Group = ALONE,
    reduce: Reduce = WHOLE_ROWS,
    most_tokens: int | None = None,
) -> LoadedModel:
    """Read, or make up, the weights that `config` asks for, in a form that its kernels take.

    group: the ranks that the model is divided among; this one's share is kept. reduce: as
    ParallelConfig has it. most_tokens: of a request, if that is less than the model's limit.

    Raises:
        ConfigError: when the model, or a setting for it, cannot be served.
    """
    on_device = device.torch_device
    call_functions_once()
    # First: what this refuses needs no download.
    ops = _chosen_ops(config, on_device, group.world_size)
    directory, spec = _found_model(config, group.world_size, reduce)
    dtype: torch.dtype = getattr(torch, dtype_name(config.dtype, spec))
    longest = max_model_len(config.max_model_len, spec)
    if most_tokens is not None:
        longest = min(longest, most_tokens)
    own_kv = [kv.of_rank(place_of(group)) for kv in spec.kv_specs()]
    kv_block_bytes(own_kv, ops, block_size, dtype)  # kernels refuse some sizes of heads
    source = open_weights(directory, spec, config.load_format, config.seed, dtype, on_device)
    tables = spec.rotary_tables(longest)
    on_device_tables = [table.to(on_device) for table in tables]

    def build(weights: WeightReader) -> Model:
        return spec.build(weights, ops, on_device_tables, group)

    model, weights = Loading(spec, source, dtype, ops, build).load(config, group)
    forget_header()
    fingerprint = model_fingerprint(
        spec, dtype, weights.digest(), tables, machine_numerics(ops), block_size
    )
    argmax = model.screened_argmax
    is_screened = bool(least(group, int(argmax is not None)))  # by all ranks, or by none
    return LoadedModel(
        device=device,
        ops=ops,
        spec=spec,
        dtype=dtype,
        max_model_len=longest,
        model=model,
        sampler=_sampler(ops, config, group),
        screening=LMHeadScreening(argmax) if argmax is not None and is_screened else None,
        fingerprint=fingerprint,
        vocabulary=vocabulary_of(spec, dtype, weights),
        biases=weights.biases,
        weights=_described(source, weights.kept, dtype),
    )


def _found_model(config: ModelConfig, num_ranks: int, reduce: Reduce) -> tuple[Path, ModelSpec]:
    """Where the model lies, downloaded if it has to be, and what its config says of it."""
    directory = model_path(
        config.model,
        config.revision,
        config.load_format,
        with_weights=config.load_format != RANDOM_WEIGHTS,
    )
    check_quantization(directory, config.load_format, config.quantization)
    spec = load_spec(directory, config.load_format, config.model_impl)
    return directory, spec.divided(num_ranks, reduce)


def vocabulary_of(spec: ModelSpec, dtype: torch.dtype, weights: WeightReader) -> Vocabulary | None:
    """Told with what its matrices hold: adapters store copies of them."""
    found = spec.vocabulary()
    if found is None:
        return None
    stored = {found.embedding: found.embedding, found.head: found.head}
    if found.is_tied:
        stored[found.head] = found.embedding
    digests = {name: weights.digests.get(f"{tensor}.weight") for name, tensor in stored.items()}
    return replace(
        found,
        dtype=str(dtype).removeprefix("torch."),
        digests={name: digest for name, digest in digests.items() if digest is not None},
    )


def _described(source: TensorSource, kept: Mapping[str, str], dtype: torch.dtype) -> str:
    """The format of the weights, and which of them stay the codes that they were stored as.

    kept: as WeightReader has it.
    """
    if not kept:
        if source.is_quantised:
            floats = str(dtype).removeprefix("torch.")
            logger.info(
                "%s: no codes are kept; weights are dequantised to %s", source.described, floats
            )
        return source.described
    formats = Counter(kept.values())
    of_experts = Counter(form for name, form in kept.items() if ".experts." in name)
    counts = ", ".join(
        f"{count} matrices of {form}" + f" ({of_experts[form]} of experts)" * (form in of_experts)
        for form, count in sorted(formats.items())
    )
    logger.info("%s: codes are kept of %s; the others are floats", source.described, counts)
    return f"{source.described}, codes kept of {', '.join(sorted(formats))}"


def _sampler(ops: Ops, config: ModelConfig, group: Group) -> Sampler:
    if group.rank != ROOT:
        return FollowingSampler()
    return select_sampler(ops, LogprobsMode.named(config.logprobs_mode))


def _chosen_ops(config: ModelConfig, device: torch.device, world_size: int) -> Ops:
    ops = choose_ops(
        config.override_op,
        device,
        config.batch_invariant,
        config.pin_cpu_threads,
        config.overlap_launches,
    )
    ops = with_screening(ops, config.lm_head_screen)
    if world_size > 1 and REFERENCE in ops.numerics:
        raise refuse_reference_sums(world_size)
    if config.quantizes_to is None:
        return ops
    quantization = Quantization(FORMATS[config.quantizes_to], config.quantize_activations)
    logger.info("linear layers are quantised: %s", quantization)
    return quantize_linears(ops, quantization)
