"""Train a LoRA adapter with PEFT, serve it, train it again, and replace it while the server runs.

    lora-serve serve --enable-lora                # in another terminal; any model will do
    python examples/train_and_replace.py

Each version learns one answer. The question is the same each time, so a server that answered from
the old version's cache would be caught at once.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import httpx
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTION = [{"role": "user", "content": "Which version are you?"}]
NAME = "my-adapter"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://localhost:8000", help="the server")
    parser.add_argument("--model", help="the model's directory; that of the server if left out")
    args = parser.parse_args()
    with httpx.Client(base_url=args.url, timeout=120) as server:
        model = args.model or base_model(server)
        for version, answer in enumerate(("I am the first one.", "I am the second one."), 1):
            with tempfile.TemporaryDirectory() as directory:
                train(model, answer, Path(directory))
                digest = load(server, Path(directory))
                print(f"version {version}, digest {digest[:12]}: {ask(server)!r}")
                assert ask(server).strip() == answer, "the answer is another version's"


def base_model(server: httpx.Client) -> str:
    """Where the served model lies: that is what an adapter must be trained on."""
    models = server.get("/v1/models").raise_for_status().json()["data"]
    return str(next(model["root"] for model in models if model["parent"] is None))


def train(model_path: str, answer: str, directory: Path) -> None:
    """Teach an adapter to give this answer, and save it as PEFT does."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
    base = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, trust_remote_code=False
    )
    config = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, config)

    prompt = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )["input_ids"]
    told = answer + tokenizer.eos_token
    answer_ids = tokenizer(told, add_special_tokens=False, return_tensors="pt")["input_ids"]
    input_ids = torch.cat([prompt, answer_ids], dim=1)
    labels = input_ids.clone()
    labels[:, : prompt.shape[1]] = -100  # nothing is to be learnt of the question

    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    for _ in range(100):
        loss = model(input_ids=input_ids, labels=labels).loss
        if loss.item() < 0.01:
            break
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    model.save_pretrained(directory)


def load(server: httpx.Client, directory: Path) -> str:
    """Load the adapter, or replace the one of that name; its digest, which says what serves now."""
    body = {"lora_name": NAME, "lora_path": str(directory), "load_inplace": True}
    server.post("/v1/load_lora_adapter", json=body).raise_for_status()
    return str(server.get(f"/v1/models/{NAME}").raise_for_status().json()["digest"])


def ask(server: httpx.Client) -> str:
    body = {"model": NAME, "messages": QUESTION, "temperature": 0, "max_tokens": 32}
    answer = server.post("/v1/chat/completions", json=body).raise_for_status().json()
    return str(answer["choices"][0]["message"]["content"])


if __name__ == "__main__":
    main()
