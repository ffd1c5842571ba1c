"""The model, adapters and scenarios that lora-serve demo shows."""
