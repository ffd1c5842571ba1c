"""One rank: holds weights, KV and adapters, and executes steps. Knows no request."""

from __future__ import annotations

import torch

from lora_serve.config import CacheConfig, LoRAConfig, ModelConfig
from lora_serve.errors import ConfigError
from lora_serve.layers.rotary import rotary_table
from lora_serve.models.decoder import build_decoder
from lora_serve.models.fingerprint import model_fingerprint
from lora_serve.models.layout import lora_modules
from lora_serve.models.source import load_spec, model_directory
from lora_serve.models.spec import DecoderSpec
from lora_serve.models.weights import WeightReader, open_weights
from lora_serve.ops import Ops
from lora_serve.ops.backends import choose_ops, machine_numerics
from lora_serve.step import AdapterCheckpoint, ModelInfo, ModelRunnerOutput, SchedulerOutput
from lora_serve.worker.batch_builder import BatchBuilder
from lora_serve.worker.kv_cache import (
    allocate_kv_caches,
    available_memory_bytes,
    kv_block_bytes,
    num_kv_blocks,
)
from lora_serve.worker.lora_slots import LoRASlots
from lora_serve.worker.model_runner import ModelRunner

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Worker:
    """`load` comes first. `prepare_adapter` may run in another thread than all the rest."""

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        lora: LoRAConfig,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._model = model
        self._cache = cache
        self._lora = lora
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._adapters: LoRASlots
        self._runner: ModelRunner

    @torch.inference_mode()
    def load(self) -> ModelInfo:
        """Load the model and make the KV pool.

        Raises:
            ConfigError: when the model, or a setting for it, cannot be served.
        """
        if self._model.cpu_threads is not None:
            torch.set_num_threads(self._model.cpu_threads)
        with_weights = self._model.load_format != "dummy"
        directory = model_directory(
            self._model.model, self._model.revision, with_weights=with_weights
        )
        spec = load_spec(directory)
        dtype = _model_dtype(self._model.dtype, spec)
        max_model_len = _max_model_len(self._model.max_model_len, spec)
        ops = choose_ops(self._model.override_op)
        source = open_weights(directory, spec, self._model.load_format, self._model.seed, dtype)
        weights = WeightReader(source, dtype)
        cos_sin = rotary_table(spec.rope, spec.head_size, spec.max_positions)
        decoder = build_decoder(spec, weights, ops, cos_sin)
        block_size = self._cache.block_size
        num_blocks = self._num_blocks(spec, ops, dtype, max_model_len)
        self._adapters = LoRASlots(spec, ops, dtype)
        self._runner = ModelRunner(
            decoder,
            allocate_kv_caches(spec, ops, num_blocks, block_size, dtype),
            BatchBuilder(ops, block_size, spec.hidden_size, dtype),
            self._adapters,
        )
        return ModelInfo(
            fingerprint=model_fingerprint(
                spec, dtype, weights.digest(), cos_sin, machine_numerics(ops), block_size
            ),
            dtype=str(dtype).removeprefix("torch."),
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            kernels=ops.numerics,
            lora_modules=lora_modules(spec),
        )

    @torch.inference_mode()
    def prepare_adapter(self, checkpoint: AdapterCheckpoint) -> None:
        """Make the adapter's weights ready for a later step's `add_adapters`."""
        self._adapters.prepare(checkpoint)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Let adapters go and come, then run the batch, if there is one."""
        self._check(step)
        self._adapters.change(step.drop_adapters, step.add_adapters)
        return ModelRunnerOutput(step.step_id, self._runner.run(step.requests))

    def _check(self, step: SchedulerOutput) -> None:
        num_loras = len({request.adapter.digest for request in step.requests if request.adapter})
        assert len(step.requests) <= self._max_num_seqs, f"step of {len(step.requests)} requests"
        assert step.num_tokens <= self._max_num_batched_tokens, f"step of {step.num_tokens} tokens"
        assert num_loras <= self._lora.max_loras, f"step of {num_loras} adapters"

    def _num_blocks(
        self, spec: DecoderSpec, ops: Ops, dtype: torch.dtype, max_model_len: int
    ) -> int:
        block_size = self._cache.block_size
        return num_kv_blocks(
            self._cache,
            block_bytes=kv_block_bytes(spec, ops, block_size, dtype),
            most_needed=self._max_num_seqs * -(-max_model_len // block_size),
            available_bytes=available_memory_bytes(),
        )


def _model_dtype(setting: str, spec: DecoderSpec) -> torch.dtype:
    name = (spec.dtype or "float32") if setting == "auto" else setting
    if name not in _DTYPES:
        raise ConfigError(
            f"the checkpoint's dtype {name} is not supported; set --dtype to one of "
            f"{', '.join(_DTYPES)}"
        )
    return _DTYPES[name]


def _max_model_len(setting: int | None, spec: DecoderSpec) -> int:
    if setting is None:
        return spec.max_positions
    if setting > spec.max_positions:
        raise ConfigError(
            f"--max-model-len {setting} is above the {spec.max_positions} positions of the model; "
            "lower it"
        )
    return setting
