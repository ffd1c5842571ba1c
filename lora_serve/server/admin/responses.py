"""Bodies of answers on the routes for operators."""

from __future__ import annotations

import msgspec


class Success(msgspec.Struct, frozen=True):
    success: bool


class Version(msgspec.Struct, frozen=True):
    version: str


class Load(msgspec.Struct, frozen=True):
    server_load: int
