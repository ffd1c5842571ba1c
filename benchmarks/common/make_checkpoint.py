"""A model and adapters to measure with: the shape of Qwen2.5-0.5B, and weights from a seed.

Speed does not depend on what the weights are, and nothing has to be downloaded. The tokenizer is
a byte-level BPE of the right size whose tokens are ASCII: servers that hold back half a character
send every token at once. What is written is kept, and written again only if the recipe changes.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SEED = 20_240_919
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """config.json's own names, so that the fields are the config."""

    hidden_size: int = 896
    intermediate_size: int = 4864
    num_hidden_layers: int = 24
    num_attention_heads: int = 14
    num_key_value_heads: int = 2
    head_dim: int = 64
    vocab_size: int = 151_936
    max_position_embeddings: int = 32_768
    tie_word_embeddings: bool = True

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of each of a layer's projections, by its name within the layer."""
        hidden, inner = self.hidden_size, self.intermediate_size
        query = self.num_attention_heads * self.head_dim
        key_value = self.num_key_value_heads * self.head_dim
        return {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key_value, hidden),
            "self_attn.v_proj": (key_value, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureShape(ModelShape):
    """OLMoE-1B-7B's, with a quarter of its 16 layers. intermediate_size: of one expert."""

    hidden_size: int = 2048
    intermediate_size: int = 1024
    num_hidden_layers: int = 4
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int = 128
    vocab_size: int = 50_304
    max_position_embeddings: int = 4096
    tie_word_embeddings: bool = False
    num_experts: int = 64
    num_experts_per_tok: int = 8

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        sizes = ModelShape.projections.fget(self)  # type: ignore[attr-defined]
        attention = {name: size for name, size in sizes.items() if name.startswith("self_attn.")}
        experts = {
            f"mlp.experts.{expert}.{name.removeprefix('mlp.')}": size
            for expert, (name, size) in product(range(self.num_experts), sizes.items())
            if name.startswith("mlp.")
        }
        return attention | experts


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """rank, and the projections it is on by their last names; none means all."""

    rank: int = 16
    targets: tuple[str, ...] = ()


QWEN_0_5B = ModelShape()
QWEN_3B = ModelShape(
    hidden_size=2048,
    intermediate_size=11_008,
    num_hidden_layers=36,
    num_attention_heads=16,
    head_dim=128,
)
OLMOE = MixtureShape()
ALL_PROJECTIONS = AdapterShape()
ATTENTION_ONLY = AdapterShape(8, ("q_proj", "k_proj", "v_proj", "o_proj"))  # S-LoRA's setting S1


def ensure_checkpoint(directory: Path, shape: ModelShape = QWEN_0_5B) -> Path:
    """Write the model, unless this very one is there; its directory."""
    if _begin(directory, recipe := f"model 1 {asdict(shape)}"):
        (directory / "config.json").write_text(json.dumps(_config(shape), indent=2))
        _write_tokenizer(directory, shape.vocab_size)
        save_file(dict(_weights(shape)), directory / "model.safetensors", {"format": "pt"})
        _finish(directory, recipe)
    return directory


def ensure_adapters(
    directory: Path, count: int, adapter: AdapterShape, shape: ModelShape = QWEN_0_5B
) -> dict[str, Path]:
    """Write `count` PEFT adapters of one shape, unless they are there; their paths by name."""
    paths = {f"{directory.name}-{number}": directory / str(number) for number in range(count)}
    for number, path in enumerate(paths.values()):
        if _begin(path, recipe := f"adapter 2 {number} {asdict(adapter)} {asdict(shape)}"):
            _write_adapter(path, number, adapter, shape)
            _finish(path, recipe)
    return paths


def _begin(directory: Path, recipe: str) -> bool:
    """Whether the directory must be written; it is then empty."""
    mark = directory / "recipe"
    if mark.is_file() and mark.read_text() == recipe:
        return False
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return True


def _finish(directory: Path, recipe: str) -> None:
    (directory / "recipe").write_text(recipe)


def _config(shape: ModelShape) -> dict[str, object]:
    is_mixture = isinstance(shape, MixtureShape)
    return {
        "architectures": ["OlmoeForCausalLM" if is_mixture else "Qwen2ForCausalLM"],
        "model_type": "olmoe" if is_mixture else "qwen2",
        **asdict(shape),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "use_cache": True,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": shape.vocab_size - 3,
        "eos_token_id": shape.vocab_size - 3,
    }


def _weights(shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(SEED)

    def normal(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=random) * 0.02).bfloat16()

    def ones() -> torch.Tensor:
        return torch.ones(shape.hidden_size, dtype=torch.bfloat16)

    is_mixture = isinstance(shape, MixtureShape)
    yield "model.embed_tokens.weight", normal(shape.vocab_size, shape.hidden_size)
    for layer in range(shape.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        for name, (outputs, inputs) in shape.projections.items():
            yield f"{prefix}.{name}.weight", normal(outputs, inputs)
            if name.endswith(("q_proj", "k_proj", "v_proj")) and not is_mixture:
                yield f"{prefix}.{name}.bias", normal(outputs)
        if isinstance(shape, MixtureShape):
            yield f"{prefix}.mlp.gate.weight", normal(shape.num_experts, shape.hidden_size)
            yield f"{prefix}.self_attn.q_norm.weight", ones()
            yield f"{prefix}.self_attn.k_norm.weight", ones()
        yield f"{prefix}.input_layernorm.weight", ones()
        yield f"{prefix}.post_attention_layernorm.weight", ones()
    yield "model.norm.weight", ones()
    if not shape.tie_word_embeddings:
        yield "lm_head.weight", normal(shape.vocab_size, shape.hidden_size)


def _write_adapter(path: Path, number: int, adapter: AdapterShape, shape: ModelShape) -> None:
    random = torch.Generator().manual_seed(SEED + 1 + number)
    tensors = {}
    for layer, (name, size) in product(range(shape.num_hidden_layers), shape.projections.items()):
        if adapter.targets and name.rpartition(".")[2] not in adapter.targets:
            continue
        prefix = f"base_model.model.model.layers.{layer}.{name}"
        outputs, inputs = size
        a = torch.randn(adapter.rank, inputs, generator=random) * inputs**-0.5
        b = torch.randn(outputs, adapter.rank, generator=random) * 0.05
        tensors |= {
            f"{prefix}.lora_A.weight": a.bfloat16(),
            f"{prefix}.lora_B.weight": b.bfloat16(),
        }
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    targets = adapter.targets or tuple(name.rpartition(".")[2] for name in shape.projections)
    (path / "adapter_config.json").write_text(json.dumps(_adapter_config(adapter.rank, targets)))


def _adapter_config(rank: int, targets: Sequence[str]) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "benchmark",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
    }


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    tokenizer = _tokenizer(vocab_size)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[0],
        "model_max_length": 32_768,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _tokenizer(vocab_size: int) -> Tokenizer:
    """All bytes, all pairs of letters, then pairs of pairs until the vocabulary is full."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = ["".join(letters) for letters in product(ascii_lowercase, repeat=2)]
    room = vocab_size - len(alphabet) - len(pairs) - len(SPECIAL_TOKENS)
    assert room >= 0, f"a vocabulary of {vocab_size} has no room for bytes and pairs"
    quads = list(islice(product(pairs, repeat=2), room))
    words = [*alphabet, *pairs, *(first + second for first, second in quads)]
    assert len(words) == vocab_size - len(SPECIAL_TOKENS), f"{vocab_size} is more than all words"
    vocab = {word: number for number, word in enumerate(words)}
    merges = [(pair[0], pair[1]) for pair in pairs] + quads
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the benchmarks' model and adapters.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--adapters", type=int, default=8, help="of rank 16, on all projections")
    parser.add_argument("--small-adapters", type=int, default=0, help="of rank 8, on attention")
    args = parser.parse_args()
    print(ensure_checkpoint(args.directory / "model"))
    ensure_adapters(args.directory / "r16", args.adapters, ALL_PROJECTIONS)
    ensure_adapters(args.directory / "r8", args.small_adapters, ATTENTION_ONLY)


if __name__ == "__main__":
    main()
