"""Draws how a trace's server is set up: mostly with too little of everything."""

from __future__ import annotations

import json
from random import Random

from lora_serve.config.model import LOGPROBS_MODES
from lora_serve.config.parallel import ALL_REDUCE, SEGMENTS
from lora_serve.config.speculative import LOOKED_UP
from lora_serve.pooling import SequencePoolingType

# A prompt, at most 9 tokens longer than its prefix, and its answer just fit the smallest pool; two
# that share nothing do not, so that the one that grows last is preempted.
POOLS = (20, 20, 24, 32, 1000)  # blocks, of 16 tokens or more
LOGPROBS_MODE_SHARE = 0.5  # of the traces
RANKS_SHARE = 0.2  # of the traces
SEGMENTS_SHARE = 0.2  # of those that can have them
ALL_REDUCE_SHARE = 0.2  # of those with ranks and without segments
WEIGHTS_SHARE = 0.3  # of the traces
WORKSPACE = "@workspace"  # stands for a directory that all traces of a run share
SERVED_MODEL = "@model"  # stands for the directory of the model that the trace's server serves
DRAFT_MODEL_SHARE = 0.25  # of the traces in which something is guessed
MODEL_IMPL_SHARE = 0.15  # of the traces
QUANTIZATION_SHARE = 0.2  # of the traces
SHARED_TIERS = frozenset({"disk", "redis"})


def _flags(rng: Random, tiers: tuple[str, ...]) -> tuple[str, ...]:
    max_loras = rng.choice((1, 2, 8))
    flags = [
        *("--num-gpu-blocks-override", str(rng.choice(POOLS))),
        *("--max-num-seqs", str(rng.choice((2, 8, 16, 16)))),
        *("--max-num-batched-tokens", str(rng.choice((32, 100, 2048)))),
        *("--max-loras", str(max_loras), "--max-cpu-loras", str(max_loras + rng.choice((0, 1, 8)))),
        *("--scheduling-policy", rng.choice(("fcfs", "priority"))),
        *("--fair-share", rng.choice(("none", "none", "adapter"))),
        *("--prefix-caching-hash-algo", rng.choice(("sha256", "xxh3_128"))),
    ]
    if rng.random() < (0.3 if tiers else 0.1):
        flags.append("--no-enable-prefix-caching")
    if rng.random() < 0.2:
        flags.append("--enforce-eager")
    if tiers:
        flags += ["--kv-store-policy", rng.choice(("all", "all", "prompt-only", "after-n-hits"))]
    return tuple(flags)


def drawn_flags(
    seed: int,
    rng: Random,
    tiers: tuple[str, ...],
    pooling_type: SequencePoolingType,
    num_ranks: tuple[int, ...],
    in_segments: tuple[int, ...],
    all_reduced: tuple[int, ...],
    model_impls: tuple[str, ...],
    quantizations: tuple[str, ...],
) -> tuple[str, ...]:
    """All flags, of which the later ones are not drawn from `rng`. Others as `Scope` has them."""
    pooler = ("--pooler-config", json.dumps({"pooling_type": pooling_type}))
    mode_rng = Random(f"logprobs mode {seed}")
    mode = mode_rng.choice(LOGPROBS_MODES) if mode_rng.random() < LOGPROBS_MODE_SHARE else ""
    shares = ("--fair-share", "key") if Random(f"fair share {seed}").random() < 0.2 else ()
    is_producer = not SHARED_TIERS.isdisjoint(tiers) and Random(f"KV role {seed}").random() < 0.2
    role = ("--kv-role", "kv_producer") if is_producer else ()
    # Of models that transformers' modules run there are no ranks, and no sums in segments.
    impl = _model_impl(Random(f"model impl {seed}"), model_impls)
    computed_by = impl or _ranks(seed, num_ranks, in_segments, all_reduced)
    keeps_weights = Random(f"weights {seed}").random() < WEIGHTS_SHARE
    weights = ("--weights-cache-path", f"{WORKSPACE}/weights") if keeps_weights else ()
    later = (*pooler, *shares, *role, *computed_by, *(("--logprobs-mode", mode) if mode else ()))
    bits = _quantization(Random(f"quantization {seed}"), quantizations)
    speculation = _speculation(Random(f"speculation {seed}"))
    return (*_flags(rng, tiers), *later, *bits, *weights, *speculation)


def _ranks(
    seed: int,
    num_ranks: tuple[int, ...],
    in_segments: tuple[int, ...],
    all_reduced: tuple[int, ...],
) -> tuple[str, ...]:
    rng = Random(f"ranks {seed}")
    is_divided = bool(num_ranks) and rng.random() < RANKS_SHARE
    size = rng.choice(num_ranks) if is_divided else 1
    ranks = ("--tensor-parallel-size", str(size)) if is_divided else ()
    if size in in_segments and Random(f"segments {seed}").random() < SEGMENTS_SHARE:
        return (*ranks, "--tensor-parallel-reduce", SEGMENTS)
    if size in all_reduced and Random(f"all-reduce {seed}").random() < ALL_REDUCE_SHARE:
        return (*ranks, "--tensor-parallel-reduce", ALL_REDUCE)
    return ranks


def _model_impl(rng: Random, model_impls: tuple[str, ...]) -> tuple[str, ...]:
    is_other = bool(model_impls) and rng.random() < MODEL_IMPL_SHARE
    return ("--model-impl", rng.choice(model_impls)) if is_other else ()


def _quantization(rng: Random, quantizations: tuple[str, ...]) -> tuple[str, ...]:
    if not quantizations or rng.random() >= QUANTIZATION_SHARE:
        return ()
    weights = ("--quantization", rng.choice(quantizations))
    return (*weights, "--quantize-activations") if rng.random() < 0.5 else weights


def _speculation(rng: Random) -> tuple[str, ...]:
    """What drafts, in two of three traces; in some of the others not even forced tokens are."""
    method = rng.choice(("", *LOOKED_UP))
    if not method:
        return rng.choice(((), ("--speculation", "off")))
    settings: dict[str, object] = {
        "method": method,
        "num_speculative_tokens": rng.choice((1, 3, 8)),
        "max_step_rows": rng.choice((4, 16, 64)),
    }
    if rng.random() < 0.5:
        settings["measure_row_costs"] = False  # more is guessed
    if method == "ngram":
        settings["prompt_lookup_min"] = 1
    if rng.random() < DRAFT_MODEL_SHARE:
        settings |= {"method": "draft_model", "model": SERVED_MODEL}
    return ("--speculative-config", json.dumps(settings))
