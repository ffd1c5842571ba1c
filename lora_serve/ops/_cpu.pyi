"""The native side of ops/cpu, built from csrc/cpu. Takes addresses, sizes and dtype codes."""

from collections.abc import Sequence

from lora_serve.ops.contract import TokenChoice

# a, b, rank, in_features, out_features, out_start, scale
_Part = tuple[int, int, int, int, int, int, float]

def usable_paths() -> list[str]: ...
def use_huge_pages(address: int, num_bytes: int, /) -> None: ...

class BlockReader:
    """type_name: of a GGUF file's blocks. Addresses are of contiguous memory; offsets may be 0."""

    def __init__(self, num_threads: int, /) -> None: ...
    def unpack(
        self,
        type_name: str,
        blocks: int,
        num_blocks: int,
        codes: int,
        scales: int,
        offsets: int,
        /,
    ) -> None: ...
    def dequantize(
        self, type_name: str, blocks: int, num_blocks: int, dtype: int, to: int, /
    ) -> None: ...

# address, bytes
_MemoryPart = tuple[int, int]

# Each of these may be made of the parts of one that was packed before, which are not copied, but
# for a screen's norms. ValueError for parts of another size.

class PackedWeight:
    def __init__(
        self, dtype: int, out_features: int, in_features: int, packed: _MemoryPart, /
    ) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def parts(self) -> list[_MemoryPart]: ...

class PackedQuantized:
    """layout: how codes, scales and offsets are stored, as packing chose it."""

    def __init__(
        self,
        layout: Sequence[int],
        group: int,
        out_features: int,
        in_features: int,
        packed: _MemoryPart,
        /,
    ) -> None: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def layout(self) -> list[int]: ...
    @property
    def parts(self) -> list[_MemoryPart]: ...

class PackedScreen:
    def __init__(
        self, group: int, out_features: int, in_features: int, packed: list[_MemoryPart], /
    ) -> None: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def parts(self) -> list[_MemoryPart]: ...

class PackedExperts:
    """The addresses of packed weights, or quantised weights; and of biases, 0 for none."""

    def __init__(
        self, experts: Sequence[tuple[int, int]] | Sequence[tuple[PackedQuantized, int]], /
    ) -> None: ...

class LoraAdapter:
    def __init__(self, dtype: int, linears: Sequence[Sequence[_Part]], /) -> None: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_linears(self) -> int: ...

class StepLora:
    def __init__(self, segments: list[tuple[int, int, LoraAdapter]], /) -> None: ...
    def fill(self, segments: list[tuple[int, int, LoraAdapter]], /) -> None: ...

class StepAttention:
    def __init__(
        self,
        query_start: int,
        seq_lens: int,
        block_tables: int,
        num_requests: int,
        table_stride: int,
        /,
    ) -> None: ...

class StepEdits:
    """One row's: (address, size) of int64 ids; biases, float32; the three penalties; a bitmask."""

    def __init__(
        self,
        *,
        banned: tuple[int, int],
        biased: tuple[int, int],
        biases: int,
        prompt: tuple[int, int],
        output: tuple[int, int],
        penalties: tuple[float, float, float] | None,
        bitmask: tuple[int, int] | None,
    ) -> None: ...

# given token or -1, how it is chosen, num_top or -1, edits
_Choice = tuple[int, TokenChoice, int, StepEdits | None]
# token, logit, peak, total, rank, (token, logit) of the most likely
_Sampled = tuple[int, float, float, int, int, list[tuple[int, float]]]

class Recording:
    @property
    def num_calls(self) -> int: ...

class Backend:
    def __init__(self, path: str, num_threads: int, /) -> None: ...
    @property
    def path(self) -> str: ...
    num_threads: int
    def start_recording(self) -> None: ...
    def finish_recording(self) -> Recording: ...
    def replay(self, recording: Recording, /) -> None: ...
    def embed(
        self, weight: int, ids: int, y: int, rows: int, row_bytes: int, vocab_size: int, /
    ) -> None: ...
    def pack_weight(
        self, dtype: int, weight: int, out_features: int, in_features: int, /
    ) -> PackedWeight: ...
    def linear(
        self,
        dtype: int,
        x: int,
        weight: int,
        bias: int,
        y: int,
        rows: int,
        in_features: int,
        out_features: int,
        /,
    ) -> None: ...
    def gated_linear(
        self,
        dtype: int,
        x: int,
        weight: int,
        bias: int,
        y: int,
        rows: int,
        in_features: int,
        out_features: int,
        gate: int,
        /,
    ) -> None: ...
    def pack_quantized(
        self,
        dtype: int,
        weight: int,
        bits: int,
        group: int,
        out_features: int,
        in_features: int,
        /,
    ) -> PackedQuantized: ...
    def pack_codes(
        self,
        codes: int,
        scales: int,
        offsets: int,
        bits: int,
        group: int,
        out_features: int,
        in_features: int,
        /,
    ) -> PackedQuantized: ...
    def quantized_linear(
        self,
        dtype: int,
        x: int,
        weight: PackedQuantized,
        bias: int,
        y: int,
        rows: int,
        quantize_activations: bool,
        /,
    ) -> None: ...
    def pack_screen(
        self, dtype: int, weight: int, group: int, out_features: int, in_features: int, /
    ) -> PackedScreen | None: ...
    def screened_tokens(
        self,
        dtype: int,
        x: int,
        weight: int,
        screen: PackedScreen,
        rows: int,
        bitmasks: Sequence[bytes | None],
        choices: Sequence[TokenChoice],
        /,
    ) -> list[int]: ...
    def lora(
        self,
        dtype: int,
        x: int,
        y: int,
        step: StepLora,
        linear_index: int,
        in_features: int,
        out_features: int,
        /,
    ) -> None: ...
    def norm(
        self,
        dtype: int,
        x: int,
        x_stride: int,
        heads: int,
        residual: int,
        weight_dtype: int,
        weight: int,
        y: int,
        rows: int,
        width: int,
        eps: float,
        /,
    ) -> None: ...
    def silu_and_mul(self, dtype: int, x: int, y: int, rows: int, width: int, /) -> None: ...
    def gelu_tanh_and_mul(self, dtype: int, x: int, y: int, rows: int, width: int, /) -> None: ...
    def scale(self, dtype: int, x: int, size: int, factor: float, /) -> None: ...
    def soft_cap(self, dtype: int, x: int, size: int, cap: float, /) -> None: ...
    def gelu_tanh(self, dtype: int, x: int, size: int, /) -> None: ...
    def add(self, dtype: int, x: int, residual: int, size: int, /) -> None: ...
    def layer_norm(
        self,
        dtype: int,
        x: int,
        weight: int,
        bias: int,
        y: int,
        rows: int,
        width: int,
        eps: float,
        /,
    ) -> None: ...
    def choose(
        self,
        dtype: int,
        logits: int,
        expert_ids: int,
        weights: int,
        rows: int,
        num_experts: int,
        num_chosen: int,
        among_chosen: bool,
        /,
    ) -> None: ...
    def experts(
        self,
        dtype: int,
        x: int,
        experts: PackedExperts,
        expert_ids: int,
        y: int,
        pairs: int,
        pairs_per_row: int,
        in_features: int,
        out_features: int,
        quantize_activations: bool,
        /,
    ) -> None: ...
    def combine(
        self,
        dtype: int,
        x: int,
        weights: int,
        y: int,
        rows: int,
        pairs_per_row: int,
        width: int,
        /,
    ) -> None: ...
    def add_gated(
        self, dtype: int, x: int, gate: int, y: int, rows: int, width: int, /
    ) -> None: ...
    def rotary_and_write_kv(
        self,
        dtype: int,
        q: int,
        q_stride: int,
        k: int,
        k_stride: int,
        v: int,
        v_stride: int,
        cos_sin: int,
        positions: int,
        slots: int,
        cache: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        tokens: int,
        num_heads: int,
        /,
    ) -> None: ...
    def attention(
        self,
        dtype: int,
        q: int,
        q_stride: int,
        out: int,
        cache: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        step: StepAttention,
        num_heads: int,
        scale: float,
        window: int,
        softcap: float,
        /,
    ) -> None: ...
    def attention_with_sinks(
        self,
        dtype: int,
        q: int,
        q_stride: int,
        out: int,
        cache: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        step: StepAttention,
        num_heads: int,
        scale: float,
        window: int,
        softcap: float,
        sinks: int,
        /,
    ) -> None: ...
    def sample(
        self, dtype: int, logits: int, vocab_size: int, choices: Sequence[_Choice], /
    ) -> list[_Sampled]: ...
    def thread_ids(self) -> list[int]: ...
    def multiply_only(self, dtype: int, rounds: int, /) -> int: ...
    def read_only(self, memory: int, num_bytes: int, /) -> None: ...
