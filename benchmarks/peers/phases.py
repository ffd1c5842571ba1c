"""What is measured on every engine: the phases, their workloads, and the figure of each row."""

from __future__ import annotations

import zlib

from benchmarks.common.limits import MachineLimits, step_bytes
from benchmarks.common.make_checkpoint import QWEN_0_5B
from benchmarks.peers.measurements import RUNNING, Measurement, Need, Phase, Row
from lora_serve.bench.summary import RunSummary, Spread
from lora_serve.bench.workload import WorkloadSpec
from lora_serve.ops.quantization import FORMATS, CodeFormat


def _tokens_per_second(summary: RunSummary) -> float:
    return summary.total.output_tokens_per_second


# One request a run would be a second of it, and the first behind other engines' turns.
ONE_BY_ONE = 3
LONG_PROMPT = 32_000  # of the 32,768 tokens that the model can have
LONG_RUN_SECONDS = 1200.0


def _prefill_rate(summary: RunSummary) -> float:
    """Prompt tokens over the time to the first token: what a waiting user sees of prefill."""
    ttft = summary.total.ttft
    assert ttft is not None, "no request failed, so each has a first token"
    return summary.total.prompt_tokens / summary.total.num_requests / (ttft.p50 / 1e3)


def _step_ms(summary: RunSummary) -> float:
    """The median gap between tokens; a request's share of bundled ones."""
    itl: Spread | None = summary.total.itl
    assert itl is not None, "every decode workload generates more than one token"
    return itl.p50 / summary.total.tokens_per_event


def _prefill(
    key: str, what: str, adapters: tuple[str, ...] = (), in_bf16: bool = True
) -> Measurement:
    """in_bf16: whether its products are, whatever the weights are kept in."""
    spec = WorkloadSpec(
        seed=_seed(key), num_requests=ONE_BY_ONE, input_tokens=1024, output_tokens=1,
        adapters=adapters,
    )  # fmt: skip

    def limit(machine: MachineLimits) -> float:
        return 1024 / machine.prefill_seconds(QWEN_0_5B, 1024, bool(adapters))

    title = f"prefill of 1,024 tokens, 1 request{what}"
    row = Row(key, title, "tok/s", _prefill_rate, limit if in_bf16 else None)
    return Measurement(spec=spec, max_concurrency=1, rows=(row,))


def _decode(
    key: str,
    what: str,
    running: int,
    adapters: tuple[str, ...] = (),
    needs: tuple[Need, ...] = (),
    code_format: CodeFormat | None = None,
) -> Measurement:
    spec = WorkloadSpec(
        seed=_seed(key), num_requests=running, input_tokens=32, output_tokens=64, adapters=adapters,
        popularity="round-robin",
    )  # fmt: skip

    def limit(machine: MachineLimits) -> float:
        return 1e3 * machine.step_seconds(step_bytes(QWEN_0_5B, code_format, len(adapters)))

    requests = "1 request" if running == 1 else f"{running} requests"
    row = Row(key, f"decode step, {requests}{what}", "ms", _step_ms, limit)
    return Measurement(spec=spec, max_concurrency=running, rows=(row,), needs=needs)


def _decode_8(key: str, what: str, adapters: tuple[str, ...]) -> Measurement:
    return _decode(key, what, RUNNING, adapters, ("adapter_batching",))


def _quantized(
    kind: str, what: str, running: int | None = None
) -> tuple[tuple[Measurement, ...], ...]:
    """The rounds of a phase in fewer bits; `running`: how many decode at once, if any do."""
    weights, _, activations = kind.partition("-")
    code_format = FORMATS[weights]
    prefill = _prefill(f"{kind}-prefill", what, in_bf16=not activations)
    alone = (prefill,), (_decode(f"{kind}-decode-1", what, 1, code_format=code_format),)
    if running is None:
        return alone
    key = f"{kind}-decode-{running}"
    together = _decode(key, f" at once{what}", running, (), ("batching",), code_format)
    return *alone, (together,)


def _closed_loop() -> Measurement:
    key = "closed-loop"
    spec = WorkloadSpec(seed=_seed(key), num_requests=16, input_tokens=128, output_tokens=64)
    title = "16 requests, 8 at a time, 128 in, 64 out"

    def limit(machine: MachineLimits) -> float:
        prompts = 16 * machine.prefill_seconds(QWEN_0_5B, 128, False)
        steps = 2 * 63 * machine.step_seconds(step_bytes(QWEN_0_5B, None, 0))
        return 16 * 64 / (prompts + steps)

    rate = Row(key, title, "tok/s", _tokens_per_second, limit)
    return Measurement(spec=spec, max_concurrency=RUNNING, rows=(rate,))


def _long_prompt() -> Measurement:
    """One run: a warm-up as long as this would double the minutes, and changes little of them."""
    key = "long-prefill"
    spec = WorkloadSpec(
        seed=_seed(key), num_requests=1, input_tokens=LONG_PROMPT, output_tokens=1
    )  # fmt: skip
    title = f"prefill of {LONG_PROMPT:,} tokens, 1 request"
    row = Row(key, title, "tok/s", _prefill_rate)
    return Measurement(
        spec=spec, max_concurrency=1, rows=(row,), warm_up=False, run_seconds=LONG_RUN_SECONDS
    )


def _four_adapters(temperature: str, seed: int) -> Measurement:
    """Cold and hot differ by the seed of own tokens; the prefixes of hot are those of cold.

    Of its first run, which every engine has made.
    """
    spec = WorkloadSpec(
        seed=seed, prefix_seed=400, num_requests=16, shared_prefix_tokens=512, input_tokens=64,
        output_tokens=32, adapters=names("r16", 4), popularity="round-robin",
    )  # fmt: skip
    title = f"4 adapters, 16 requests, 8 at a time, 512 shared + 64 in, 32 out, {temperature}"
    row = Row(f"four-{temperature}", title, "tok/s", _tokens_per_second)
    is_cold = temperature == "cold"
    return Measurement(
        spec=spec, max_concurrency=RUNNING, rows=(row,), warm_up=is_cold, new_prefixes=is_cold
    )


def _zipf(server: int, count: int) -> Measurement:
    key = f"zipf-{count}"
    spec = WorkloadSpec(
        seed=_seed(key), num_requests=48, input_tokens=64, output_tokens=32,
        adapters=names("r8", count), popularity="zipf",
    )  # fmt: skip
    title = f"{count:,} adapters registered, Zipf, 48 requests, 8 at a time, 64 in, 32 out"
    row = Row(key, title, "tok/s", _tokens_per_second)
    return Measurement(spec=spec, max_concurrency=RUNNING, rows=(row,), server=server)


def _seed(key: str) -> int:
    """Another one for every measurement, so that no two on one server share a prompt."""
    return zlib.crc32(key.encode())


def names(kind: str, count: int) -> tuple[str, ...]:
    """The adapters' names, as make_checkpoint gives them."""
    return tuple(f"{kind}-{number}" for number in range(count))


ONE = names("r16", 1)
MANY = (4, 1000)
PHASES = (
    Phase(
        name="base",
        rounds=(
            (_prefill("prefill", ""),),
            (_decode("decode-1", "", 1),),
            (_decode("decode-8", " at once", RUNNING, needs=("batching",)),),
            (_closed_loop(),),
        ),
    ),
    Phase(
        name="adapters",
        num_adapters=(8,),
        needs=("adapters",),
        rounds=(
            (
                _prefill("prefill-base", ", none of 8 adapters"),
                _prefill("prefill-adapter", ", one adapter", ONE),
            ),
            (
                _decode("decode-base", ", none of 8 adapters", 1),
                _decode("decode-adapter", ", one adapter", 1, ONE),
            ),
            (
                _decode_8("decode-8-base", " at once, none of 8 adapters", ()),
                _decode_8("decode-8-of-1", " at once, all of one adapter", ONE),
                _decode_8("decode-8-of-8", " at once, of 8 adapters", names("r16", 8)),
            ),
            (_four_adapters("cold", 400),),
            (_four_adapters("hot", 450),),
        ),
    ),
    Phase(
        name="zipf",
        num_adapters=MANY,
        small_adapters=True,
        is_of_ours=True,
        needs=("many_adapters",),
        rounds=(tuple(_zipf(server, count) for server, count in enumerate(MANY)),),
    ),
    Phase(
        name="int8",
        quantization="int8",
        needs=("int8",),
        rounds=_quantized("int8", ", int8 weights", RUNNING),
    ),
    Phase(
        name="int8-activations",
        quantization="int8",
        quantize_activations=True,
        needs=("int8",),
        rounds=_quantized("int8-activations", ", int8 weights and activations", RUNNING),
    ),
    Phase(
        name="int4",
        quantization="int4",
        needs=("int4",),
        rounds=_quantized("int4", ", int4 weights"),
    ),
    Phase(
        name="long",
        max_running=1,
        max_model_len=QWEN_0_5B.max_position_embeddings,
        rounds=((_long_prompt(),),),
    ),
)
