"""Types of the native module (csrc/bindings/module.cpp)."""

from torch import Tensor, dtype

from engine.batch import ForwardBatch

def init_tensors(
    tensor_type: type[Tensor], elements: dict[dtype, int], want_exchange: bool
) -> bool: ...
def usable_isas() -> list[str]: ...
def ceiling_work(
    isa: str, kind: str, num_threads: int, count: int, buffer: Tensor | None
) -> float: ...

class PackedLinear:
    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def num_bytes(self) -> int: ...

class CpuOps:
    def __init__(self, isa: str, num_threads: int) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear: ...
    def linear(self, x: Tensor, weight: PackedLinear, out: Tensor) -> None: ...
    def embedding(self, ids: Tensor, table: Tensor, out: Tensor) -> None: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None: ...
    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None: ...
    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None: ...
    def rope_store(
        self,
        qkv: Tensor,
        batch: ForwardBatch,
        cos: Tensor,
        sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        k_cache: Tensor,
        v_cache: Tensor,
        q_out: Tensor,
    ) -> None: ...
    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: ForwardBatch,
        scale: float,
        window: int,
        out: Tensor,
    ) -> None: ...
    def kv_move(self, kv_cache: Tensor, source: Tensor, target: Tensor) -> None: ...
    def log_sum_exp(self, logits: Tensor, out: Tensor) -> None: ...
    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        token_ids: Tensor,
        logprobs: Tensor,
        prune: bool = True,
    ) -> None: ...
    def coupled_top_k(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        target_ids: Tensor | None,
        token_ids: Tensor,
        scores: Tensor,
        logprobs: Tensor,
        prune: bool = True,
    ) -> None: ...
    def philox_words(self, counters: Tensor, keys: Tensor, out: Tensor) -> None: ...
    def philox_uniform(self, seed: int, position: int, out: Tensor) -> None: ...
