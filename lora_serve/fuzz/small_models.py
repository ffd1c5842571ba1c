"""Small models that traces are played on beside the demo's, written when a trace asks for one.

They have the demo's tokenizer and chat template. The mixture of experts has random weights, and
adapters that random numbers are; the checkpoint of GPTQ is the demo's model in codes of 4 bits, and
takes the demo's adapters.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lora_serve.demo.model import DemoPaths
from lora_serve.demo.random_adapters import write_random_adapter

if TYPE_CHECKING:
    from torch import Tensor

TURN, TURNS = 8, {5: "moe", 7: "gptq"}  # of so many traces in a row, these
GROUP, BITS = 32, 4
GAIN = 1.0  # an adapter's delta is as large as what it changes
MOE_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
OF_TOKENS = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")


def write_moe(demo: DemoPaths, directory: Path) -> DemoPaths:
    """A mixture of experts, whose adapters change attention."""
    import torch  # slow to import; not for --help
    from safetensors.torch import save_file

    from lora_serve.models.source import load_spec

    model = directory / "model"
    own = json.loads((demo.model / "config.json").read_bytes())
    config = MOE_CONFIG | {key: own[key] for key in OF_TOKENS}
    _with_demo_tokenizer(demo, model, config)
    spec, numbers = load_spec(model), torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in spec.tensor_shapes().items():
        values = torch.randn(shape, generator=numbers)
        is_norm = len(shape) == 1
        values = 1 + 0.1 * values if is_norm else values * (2.0 / shape[-1] ** 0.5)
        tensors[name] = values.to(torch.bfloat16)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    projections = {
        name: (layout.in_features, size)
        for layout in spec.linears()
        for name, size in layout.projections
        if ".self_attn." in name
    }
    adapters = [directory / name for name in ("alpha", "beta")]
    for seed, adapter in enumerate(adapters):
        write_random_adapter(adapter, projections, str(model), seed, GAIN)
    return DemoPaths(model, *adapters)


def write_gptq(demo: DemoPaths, directory: Path) -> DemoPaths:
    """The demo's model as GPTQ has it, by rounding alone; every other layer with zero points."""
    from safetensors.torch import load_file, save_file  # with torch

    model = directory / "model"
    settings = {"quant_method": "gptq", "bits": BITS, "group_size": GROUP, "desc_act": False}
    own = json.loads((demo.model / "config.json").read_bytes())
    _with_demo_tokenizer(demo, model, own | {"quantization_config": settings})
    tensors: dict[str, Tensor] = {}
    for number, (name, weight) in enumerate(load_file(demo.model / "model.safetensors").items()):
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
            continue
        for part, values in _gptq_parts(weight.float(), is_symmetric=number % 2 == 0).items():
            tensors[f"{name.removesuffix('.weight')}.{part}"] = values.contiguous()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return DemoPaths(model, demo.alpha, demo.beta)


SMALL_MODELS: Mapping[str, Callable[[DemoPaths, Path], DemoPaths]] = {
    "moe": write_moe,
    "gptq": write_gptq,
}


def drawn_model(seed: int) -> str:
    """One of SMALL_MODELS in two of eight traces, so that a short run has both; else ""."""
    return TURNS.get(seed % TURN, "")


def _gptq_parts(weight: Tensor, *, is_symmetric: bool) -> dict[str, Tensor]:
    """(N, K), float32, as AutoGPTQ packs it; zeros are one too small in files."""
    import torch

    rows, width = weight.shape
    most = 2**BITS - 1
    groups = weight.view(rows, -1, GROUP)
    if is_symmetric:
        scales = groups.abs().amax(-1) / (most / 2)
        zeros = torch.full(scales.shape, 2 ** (BITS - 1))
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = (high - low) / most
        zeros = (-low / scales).round().clamp(1, most).to(torch.int64)
    scales = scales.to(torch.float16)
    spread = scales.float().repeat_interleave(GROUP, 1)
    numbers = (weight / spread).round().to(torch.int64) + zeros.repeat_interleave(GROUP, 1)
    return {
        "qweight": _packed(numbers.clamp(0, most)).t(),
        "qzeros": _packed(zeros.t() - 1),
        "scales": scales.t(),
        "g_idx": (torch.arange(width) // GROUP).to(torch.int32),
    }


def _packed(numbers: Tensor) -> Tensor:
    """(R, N), int64 -> (R, N * BITS / 32), int32, the first number in the lowest bits."""
    import torch

    shifts = torch.arange(0, 32, BITS)
    words = (numbers.unflatten(1, (-1, 32 // BITS)) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _with_demo_tokenizer(demo: DemoPaths, model: Path, config: Mapping[str, object]) -> None:
    model.mkdir(parents=True)
    for path in demo.model.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != "config.json":
            shutil.copy(path, model)
    (model / "config.json").write_text(json.dumps(config))
