"""What a backend packs and plans for itself: only its own kernels look into it."""

from __future__ import annotations

from typing import NewType, TypeVar

# A backend's own modules name their own types, and mypy holds its kernels to them. To layers and
# the worker they are these.
PackedLinear = NewType("PackedLinear", object)
PackedExperts = NewType("PackedExperts", object)
PackedAdapter = NewType("PackedAdapter", object)
LoRAPlan = NewType("LoRAPlan", object)
AttentionPlan = NewType("AttentionPlan", object)

# The same, of one backend.
LinearT = TypeVar("LinearT")
ExpertsT = TypeVar("ExpertsT")
AdapterT = TypeVar("AdapterT")
LoRAPlanT = TypeVar("LoRAPlanT")
AttentionPlanT = TypeVar("AttentionPlanT")
LinearOutT = TypeVar("LinearOutT", covariant=True)
LinearInT = TypeVar("LinearInT", contravariant=True)
AdapterInT = TypeVar("AdapterInT", contravariant=True)
LoRAPlanOutT = TypeVar("LoRAPlanOutT", covariant=True)
