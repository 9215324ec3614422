"""The torch reference of every op: slow, plain, and by definition right.

Each function here *defines* its op; every other backend is compared with it. Activations are fp32 and
contiguous, index tensors int32 (int64 for seeds), shapes as in the legend of ``engine/batch.py``. Results are
written to ``out`` arguments so that a step allocates nothing. Arguments were checked at the boundary of the
step; nothing is checked here. Invariant: no function reads a row's result from any other row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch import PAGE, ForwardBatch

NEG_INF = float("-inf")
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class ReferenceLinear:
    """A weight [N, K] as it came, with its optional bias [N]."""

    weight: Tensor
    bias: Tensor | None


class ReferenceOps:
    """Table of ops of the ``reference`` backend."""

    name = "reference"

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> ReferenceLinear:
        """Prepare a weight [N, K] (bf16 or fp32) for ``linear``. The handle may share its memory."""
        return ReferenceLinear(weight, None if bias is None else bias.float())

    def linear(self, x: Tensor, weight: ReferenceLinear, out: Tensor) -> None:
        """out [R, N] = x [R, K] @ weight.T + bias, fp32 activations and accumulation."""
        torch.mm(x, weight.weight.float().t(), out=out)
        if weight.bias is not None:
            out += weight.bias

    def embedding(self, ids: Tensor, table: Tensor, out: Tensor) -> None:
        """out [R, H] = table[ids]; table [V, H] bf16 or fp32."""
        out.copy_(table[ids.long()])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """out [R, H] = x / sqrt(mean(x^2) + eps) * weight; weight [H] fp32."""
        out.copy_(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        """residual [R, H] += x [R, H], in place; out [R, H] = rms_norm(residual)."""
        residual += x
        self.rms_norm(residual, weight, eps, out)

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out [R, I] = silu(gate_up[:, :I]) * gate_up[:, I:]."""
        gate, up = gate_up.chunk(2, dim=-1)
        out.copy_(torch.nn.functional.silu(gate) * up)

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
    ) -> None:
        """Split qkv [R, (Hq + 2 Hkv) D], normalise heads if asked, rotate q and k, store k and v.

        ``cos``, ``sin`` [positions, D / 2] fp32, scaled already where the rope scaling says so; halves are rotated
        as in Llama: (x1 cos - x2 sin, x2 cos + x1 sin) with x1, x2 the first and second half of the head.
        ``q_norm``, ``k_norm`` [D] are Qwen3's per-head rms norm weights. ``k_cache``, ``v_cache``
        [P, PAGE, Hkv, D] fp32 or bf16 (rounded to nearest even); row r is stored at ``batch.slots[r]``. ``q_out`` [R, Hq, D].
        """
        rows = qkv.shape[0]
        num_kv_heads, head_dim = k_cache.shape[2], k_cache.shape[3]
        num_q_heads = q_out.shape[1]
        q, k, v = qkv.view(rows, -1, head_dim).split(
            [num_q_heads, num_kv_heads, num_kv_heads], dim=1
        )
        if q_norm is not None:
            q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + eps) * q_norm
        if k_norm is not None:
            k = k * torch.rsqrt(k.square().mean(-1, keepdim=True) + eps) * k_norm
        positions = batch.positions.long()
        c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)

        def rotate(x: Tensor) -> Tensor:
            x1, x2 = x.chunk(2, dim=-1)
            return torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), dim=-1)

        q_out.copy_(rotate(q))
        slots = batch.slots.long()
        k_cache.flatten(0, 1)[slots] = rotate(k).to(k_cache.dtype)
        v_cache.flatten(0, 1)[slots] = v.to(v_cache.dtype)

    def attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: ForwardBatch,
        scale: float,
        window: int,
        out: Tensor,
    ) -> None:
        """out [R, Hq, D]: softmax(scale q k) v of each row over its own logical sequence (``ForwardBatch``).

        Query head h reads key/value head ``h // (Hq / Hkv)``. ``window`` > 0 keeps the last ``window`` logical
        positions only, the row itself included; 0 keeps all.
        """
        group = q.shape[1] // k_cache.shape[2]
        keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        for seq in range(batch.row_start.shape[0] - 1):
            for row in range(int(batch.row_start[seq]), int(batch.row_start[seq + 1])):
                logical = torch.arange(int(batch.ctx_len[row]))
                slots = batch.page_table[seq].long()[logical // PAGE] * PAGE + logical % PAGE
                tail = batch.tail_slots[
                    int(batch.tail_start[row]) : int(batch.tail_start[row + 1])
                ].long()
                slots = torch.cat((slots, tail))
                if window > 0:
                    slots = slots[-window:]
                k = keys[slots].float().repeat_interleave(group, dim=1)  # [keys, Hq, D]
                v = values[slots].float().repeat_interleave(group, dim=1)
                scores = torch.einsum("hd,khd->hk", q[row], k) * scale
                out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), v)

    def kv_move(self, kv_cache: Tensor, source: Tensor, target: Tensor) -> None:
        """kv_cache [layers, 2, P, PAGE, Hkv, D]: slot target[i] = slot source[i], all read before any is written."""
        flat = kv_cache.flatten(2, 3)
        flat[:, :, target.long()] = flat[:, :, source.long()]

    def log_sum_exp(self, logits: Tensor, out: Tensor) -> None:
        """out [L] = log(sum(exp(logits [L, V]))) of each row; -inf entries count as nothing."""
        out.copy_(torch.logsumexp(logits, dim=-1))

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
    ) -> None:
        """The one sampler (DESIGN: Gumbel-max). Row i draws the token at ``positions[i]`` with ``seeds[i]``.

        token = argmax over kept v of logits[v] / temperature + gumbel(seed, position, v), lowest id on a tie;
        temperature 0 is argmax of the logits. Kept, with z = logits / temperature: z >= max z + log(min_p), then the
        top_k largest z (0: all), then the fewest tokens, largest first, whose share of the rest's
        probability reaches top_p; ties of z are taken lowest id first.

        Args: logits [L, V] fp32, -inf where forbidden; temperature, top_p, min_p [L] fp32; top_k, positions [L]
        int32; seeds [L] int64. Writes token_ids [L] int32 and logprobs [L] fp32, the log-probability of the token
        under the kept, renormalised distribution (temperature 0: 0). A row without a finite logit gives token 0
        and logprob NaN.
        """
        for i in range(logits.shape[0]):
            if not bool(torch.isfinite(logits[i]).any()):
                token_ids[i], logprobs[i] = 0, float("nan")
                continue
            if float(temperature[i]) == 0.0:
                token = _first_argmax(logits[i].nan_to_num(NEG_INF, float("inf"), NEG_INF))
                token_ids[i] = token
                logprobs[i] = 0.0 if bool(torch.isfinite(logits[i, token])) else float("nan")
                continue
            z = logits[i] / temperature[i]
            keep = kept_mask(z, int(top_k[i]), float(top_p[i]), float(min_p[i]))
            z = torch.where(keep, z, NEG_INF)
            noise = gumbel(int(seeds[i]), int(positions[i]), z.shape[0])
            token = _first_argmax(z + noise)
            token_ids[i] = token
            logprobs[i] = z[token] - torch.logsumexp(z, dim=-1)

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
    ) -> None:
        """The tokens that a drafter proposes: the k best of a row under the noise that ``sample`` will draw with.

        Gumbel coupling (Daliri et al. 2024): with logits near the target's, the best under the same noise is near
        the target's sample. Row i ranks the kept v, as ``sample`` keeps them, by
        logits[v] / temperature + gumbel(seed, position, target id of v), largest first, lowest v on a tie;
        temperature 0 ranks all logits. Without a map the first is the token that ``sample`` draws.

        Args: as ``sample``, and target_ids [V] int32, the id in the target's vocabulary of each row of the draft's,
        or None where they are the same. Writes, all [L, k]: token_ids int32, in the target's vocabulary; scores
        fp32, what they were ranked by; logprobs fp32, log-softmax of logits / temperature over the kept ones
        (temperature 0: of the logits). Places without a token get -1, -inf and -inf.
        """
        token_ids.fill_(-1)
        scores.fill_(NEG_INF)
        logprobs.fill_(NEG_INF)
        size = logits.shape[1]
        ids = torch.arange(size) if target_ids is None else target_ids.long()
        for i in range(logits.shape[0]):
            t = float(temperature[i])
            z = logits[i] / temperature[i] if t else logits[i]
            if t:
                keep = kept_mask(z, int(top_k[i]), float(top_p[i]), float(min_p[i]))
            else:
                keep = torch.isfinite(z)
            z = torch.where(keep, z, NEG_INF)
            score = z
            if t:
                score = z + gumbel(int(seeds[i]), int(positions[i]), int(ids.max()) + 1)[ids]
            order = torch.sort(score, descending=True, stable=True).indices
            order = order[: min(int(keep.sum()), token_ids.shape[1])]
            found = order.shape[0]
            token_ids[i, :found] = ids[order].int()
            scores[i, :found] = score[order]
            logprobs[i, :found] = z[order] - torch.logsumexp(z, dim=-1)


def kept_mask(z: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Which of z [V] may be sampled: bool [V]. See ``ReferenceOps.sample``."""
    keep = torch.isfinite(z)
    if min_p > 0.0:
        keep &= z >= z.max() + torch.tensor(math.log(min_p), dtype=torch.float32)
    if top_k <= 0 and top_p >= 1.0:
        return keep
    order = torch.sort(torch.where(keep, z, NEG_INF), descending=True, stable=True).indices
    order = order[: int(keep.sum())]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1.0:
        weights = torch.exp((z[order] - z[order[0]]).double())
        before = weights.cumsum(0) - weights
        order = order[before < top_p * weights.sum()]
    keep = torch.zeros_like(keep)
    keep[order] = True
    return keep


def _first_argmax(scores: Tensor) -> int:
    return int((scores == scores.max()).nonzero()[0, 0])


def philox4x32(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """Philox4x32-10 (Salmon et al., SC'11). counter int64 [..., 4] of 32-bit words -> int64 [..., 4]."""
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap modulo 2^64, which keeps all 64 bits of an unsigned 32 x 32 product
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)


def uniform(seed: int, position: int, vocab_size: int) -> Tensor:
    """x [vocab_size] fp32 in (0, 1): word ``v % 4`` of Philox with counter (v // 4, position, 0, 0) and key = seed.

    x = (float(word >> 1) + 0.5) * 2^-31, every operation rounded to fp32, and at most 1 - 2^-24. Small x are
    exact to 24 bits: it is the small ones that win an argmax.
    """
    blocks = torch.arange((vocab_size + 3) // 4)
    counter = torch.zeros((blocks.shape[0], 4), dtype=torch.int64)
    counter[:, 0], counter[:, 1] = blocks, position
    words = philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK)).flatten()[:vocab_size]
    x = ((words >> 1).float() + 0.5) * 2.0**-31
    return x.clamp(max=1.0 - 2.0**-24)


def gumbel(seed: int, position: int, vocab_size: int) -> Tensor:
    """Standard Gumbel noise [vocab_size]: -log(-log(u)) with u = 1 - x, x from ``uniform``, so -log(u) = -log1p(-x)."""
    return -torch.log(-torch.log1p(-uniform(seed, position, vocab_size)))
