"""What the engine's process runs. The API process names it, and imports nothing that it needs."""

from __future__ import annotations

from lora_serve.config import EngineConfig


def run_engine_process(config: EngineConfig, message_address: str, reply_address: str) -> None:
    """Serve one API process until it says Shutdown, or is gone."""
    from lora_serve.engine.core.process import run_engine  # in the child: the model, torch, kernels

    run_engine(config, message_address, reply_address)
