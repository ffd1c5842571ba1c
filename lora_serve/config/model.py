"""Which model is served, and in which arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.config.overrides import check_overrides
from lora_serve.config.setting import (
    read_quantities,
    require_at_least,
    require_at_most,
    require_choices,
    setting,
)
from lora_serve.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8", "int4")
SCREENS = ("auto", "on", "off")
SAFETENSORS = "safetensors"
# Each is a module of lora_serve/models/checkpoints.
CHECKPOINT_FORMATS = (
    *(SAFETENSORS, "gguf", "gptq", "awq", "compressed_tensors", "fp8", "bitsandbytes", "mxfp4"),
)
# Those that --quantization may name, as vLLM's flag calls them.
STORED_QUANTIZATIONS = tuple(
    name.replace("_", "-") for name in CHECKPOINT_FORMATS if name != SAFETENSORS
)
AUTO, RANDOM_WEIGHTS = "auto", "dummy"
SMOLLM2 = "smollm2"  # the model that is fetched by this name
OWN_IMPL, TRANSFORMERS_IMPL = "lora_serve", "transformers"
MOST_CPU_THREADS = 2048  # above the cores of all but the very largest machines
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, in which arithmetic."""

    model: str = setting(
        "Directory, hub id or GGUF file of the model, or smollm2; the demo's own if left out.", ""
    )
    tokenizer: str | None = setting(
        "Directory or hub id of the tokenizer, if it is not the model's.", None, metavar="MODEL"
    )
    revision: str | None = setting("Branch, tag or commit of a hub model.", None, metavar="REV")
    served_model_name: tuple[str, ...] = setting(
        "Names the model answers to in the API; the model's path if left out.",
        (),
        repeat="nargs",
        metavar="NAME",
    )
    device: str = setting(
        "Where to compute; auto takes an NVIDIA GPU if torch sees one.", "auto", choices=DEVICES
    )
    dtype: str = setting(
        "Type of weights, activations and KV; auto takes the checkpoint's.",
        "auto",
        choices=DTYPES,
        spellings={"half": "float16", "float": "float32"},
    )
    quantization: str | None = setting(
        "Keep the weights of linear layers in 8 or 4 bits, quantised as they are loaded; adapters "
        "keep full precision. A quantised checkpoint's own method may be named, which changes "
        "nothing.",
        None,
        choices=(*QUANTIZATIONS, *STORED_QUANTIZATIONS),
        spellings={"awq_marlin": "awq", "gptq_marlin": "gptq"},
    )
    quantize_activations: bool = setting(
        "With --quantization, give linear layers their inputs in 8 bits, too: faster prompts, less "
        "precise.",
        False,
    )
    lm_head_screen: str = setting(
        "Keep a copy of the LM head in 8 bits, which shows steps that are greedy, or draw from few "
        "tokens, the rows that they must read; answers stay the same to the bit. auto: on CPUs "
        "that multiply bytes fast, if the copy has 16 MiB or more.",
        "auto",
        choices=SCREENS,
    )
    seed: int = setting("Seed of whatever has no seed of its own, such as dummy weights.", 0)
    max_model_len: int | None = setting(
        "Longest prompt and answer together, in tokens (16384, 16K; 16k is 16000); the model's own "
        "limit if left out.",
        None,
        quantity="count",
    )
    load_format: str = setting(
        "Where weights come from: a checkpoint of this format (auto: whichever it has), or seeded "
        "random numbers (dummy).",
        AUTO,
        choices=(AUTO, *CHECKPOINT_FORMATS, RANDOM_WEIGHTS),
    )
    model_impl: str = setting(
        "Who computes the model: lora_serve (vLLM's word is vllm), which has the families that the "
        "documentation lists; transformers, whose modules get our attention, linear layers and "
        "adapters, and which is slower; auto takes transformers for what lora_serve has not.",
        AUTO,
        choices=(AUTO, TRANSFORMERS_IMPL, OWN_IMPL),
        spellings={"vllm": OWN_IMPL},
    )
    generation_config: str = setting(
        "Take default sampling settings from the model's generation_config.json, or none.",
        "auto",
        choices=("auto", "none"),
        spellings={"vllm": "none"},
    )
    enforce_eager: bool = setting(
        "Never record steps (on GPUs: CUDA graphs); run kernels one by one.", False
    )
    max_cudagraph_capture_size: int = setting(
        "Most tokens of a step that is recorded; larger ones run kernels one by one. CPUs record "
        "only steps without prompts.",
        512,
    )
    batch_invariant: bool = setting(
        "On GPUs, sum in one order whatever the batch, so that answers are exact to the bit; CPUs "
        "always do.",
        False,
    )
    overlap_launches: bool = setting(
        "On GPUs that can (H100 and newer), start a kernel while the previous one ends; answers "
        "are the same to the bit.",
        True,
    )
    enable_prompt_embeds: bool = setting(
        "Accept prompts as embedding tensors (prompt_embeds); off because they bypass the "
        "tokenizer.",
        False,
    )
    pooler_config: str | None = setting(
        'How embeddings are made, as in \'{"pooling_type": "MEAN", "normalize": false}\': of the '
        "LAST token's hidden state or of the MEAN of all, and whether they get length 1. As the "
        "checkpoint's modules.json says if left out; without one of the last token, normalised.",
        None,
        metavar="JSON",
        aliases=("--override-pooler-config",),
    )
    max_logprobs: int = setting(
        "Most alternatives per token that a request may ask for; -1 for the whole vocabulary.", 20
    )
    logprobs_mode: str = setting(
        "What logprobs are: log-probabilities or logits, either raw, as the model gives them, or "
        "processed, as tokens are drawn from them: after penalties, biases, masks, temperature and "
        "filters (-inf for what these exclude). Those of prompts are always raw.",
        "raw_logprobs",
        choices=LOGPROBS_MODES,
    )
    max_n: int = setting("Most choices that one prompt may have: the largest n of a request.", 128)
    override_op: tuple[str, ...] = setting(
        "Use another backend's kernel, as in paged_attention=reference; repeatable.",
        (),
        repeat="append",
        metavar="OP=BACKEND",
    )
    cpu_threads: int | None = setting(
        "Threads for CPU kernels, of each rank; if left out, one for each physical core that "
        "affinity and the container's quota allow, or OMP_NUM_THREADS if that is less, divided by "
        "the ranks.",
        None,
    )
    pin_cpu_threads: bool = setting(
        "Give each of these threads its own core, if there are as many threads as cores.", True
    )

    weights_cache_path: str | None = setting(
        "Keep weights in this directory as CPU kernels take them: a later start of the same model "
        "maps them instead of reading and packing its checkpoint, and servers on one machine share "
        "their memory.",
        None,
        metavar="PATH",
    )
    weights_cache_bytes: int = setting(
        "Most that --weights-cache-path holds; what was used longest ago is deleted first.",
        64 * 2**30,
        quantity="bytes",
    )

    def __post_init__(self) -> None:
        read_quantities(self)
        require_at_least(1, "--weights-cache-bytes", self.weights_cache_bytes)
        require_choices(self)
        require_at_least(1, "--max-model-len", self.max_model_len)
        require_at_least(-1, "--max-logprobs", self.max_logprobs)
        require_at_least(1, "--max-n", self.max_n)
        require_at_least(1, "--cpu-threads", self.cpu_threads)
        require_at_most(MOST_CPU_THREADS, "--cpu-threads", self.cpu_threads)
        require_at_least(1, "--max-cudagraph-capture-size", self.max_cudagraph_capture_size)
        check_overrides(self.override_op)
        if self.pooler_config is not None:
            from lora_serve.config.pooler import parse_pooler_config  # imports numpy

            parse_pooler_config(self.pooler_config)
        if self.quantize_activations and self.quantizes_to is None:
            raise ConfigError(
                "--quantize-activations needs --quantization int8 or int4, which says how weights "
                "are kept"
            )

    @property
    def quantizes_to(self) -> str | None:
        """One of QUANTIZATIONS: what weights become while they are loaded; None: they stay."""
        return self.quantization if self.quantization in QUANTIZATIONS else None
