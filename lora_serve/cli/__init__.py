"""The lora-serve command."""
