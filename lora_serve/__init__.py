"""lora-serve: LLM serving with many LoRA adapters, exact whatever was cached."""

__version__ = "0.1.0"
