"""The formats that checkpoints come in: one module for each, behind the protocols of `base`.

A module has the name that --load-format gives it, and a `FORMAT`.
"""
