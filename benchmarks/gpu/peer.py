"""transformers, and PEFT over it, on the same card with the same shape: what must be beaten."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

RANK = 16
BARE, ADAPTED = PEERS = ("transformers", "transformers + PEFT, an adapter each")
OURSELVES = ("lora-serve", "lora-serve, an adapter each")


class Generator(Protocol):
    """A transformers model, or PEFT's wrapping of one."""

    def generate(self, prompts: torch.Tensor, **options: Any) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class PeerTiming:
    """tokens_per_second: decoded, prompts included in the time as users wait for them, too."""

    name: str
    num_requests: int
    tokens_per_second: float


def time_peer(
    name: str,
    directory: Path,
    device: torch.device,
    num_requests: int,
    prompt_len: int,
    num_tokens: int,
) -> PeerTiming:
    """One batch of one of PEERS."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    size = (num_requests, prompt_len)
    prompts = torch.randint(0, config.vocab_size, size, device=device)
    if name == ADAPTED:
        model, names = _with_adapters(model, num_requests)
        rate = _tokens_per_second(model, prompts, num_tokens, names)
    else:
        rate = _tokens_per_second(model, prompts, num_tokens)
    return PeerTiming(name, num_requests, rate)


def _with_adapters(model: PreTrainedModel, count: int) -> tuple[Generator, list[str]]:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=RANK, target_modules=targets)
    names = [f"adapter{i}" for i in range(count)]
    with warnings.catch_warnings():  # peft asks transformers by a name it is about to drop
        warnings.simplefilter("ignore", FutureWarning)
        adapted = get_peft_model(model, config, adapter_name=names[0], autocast_adapter_dtype=False)
        for name in names[1:]:
            adapted.add_adapter(name, config, autocast_adapter_dtype=False)
    return adapted.eval(), names


@torch.inference_mode()
def _tokens_per_second(
    model: Generator, prompts: torch.Tensor, num_tokens: int, names: list[str] | None = None
) -> float:
    options = {"adapter_names": names} if names else {}

    def generate(length: int) -> None:
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=False,
            min_new_tokens=length,
            max_new_tokens=length,
            pad_token_id=0,
            **options,
        )
        if prompts.device.type == "cuda":
            torch.cuda.synchronize()

    generate(2)
    begun = time.perf_counter()
    generate(num_tokens)
    return prompts.shape[0] * num_tokens / (time.perf_counter() - begun)
