"""Replicas of one server: which of them answers a request, and how Ray Serve runs them.

`serve run lora_serve.fleet:app model=…` finds `app` here, which is read when it is asked for.
"""

from __future__ import annotations


def __getattr__(name: str) -> object:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lora_serve.cli.fleet_app import app  # it reads the flags of `lora-serve serve`

    return app
