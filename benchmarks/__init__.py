"""Measurements of lora-serve and of its peers; nothing here ships in the wheel."""
