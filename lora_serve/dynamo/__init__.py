"""An engine for NVIDIA Dynamo: `python -m lora_serve.dynamo MODEL` is one of its workers.

Dynamo's frontend has the HTTP routes, templates, tokenizer and stop strings; token ids come in, and
token ids go out.
"""
