"""What speculation samples has the distribution that the model and the parameters say, and its log-probabilities.

Equality with plain decoding (``test_lossless``) would not notice a sampler that is wrong everywhere alike. Here the
oracles are other: for tokens the exact joint distribution of the first three, over a vocabulary of 16, from logits of
plain prefills, rules written here once more in fp64, ``kept_mask`` and softmax; for log-probabilities transformers.

200 000 requests are too many for a test, so the joint distribution is drawn in three steps that are tied to each other.
(1) The target verifies once, behind the prompt, the tree of all 16 + 256 continuations, planned by ``plan_step``; the
sampler turns its logits into what is drawn from, row by row. (2) ``ops.sample`` draws 200 000 seeds along that tree, each
row with the position of its ``SampleRow``: that is what is compared with the exact distribution. (3) Verifications of the
whole tree by sampler and walk, and some thousand real requests of the engine under random trees, must give the very
tokens of (2) for their seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import LLM, SamplingParams
from engine.ops.reference import kept_mask
from engine.outputs import RequestOutput
from engine.request import Request
from engine.sampler import SampleRow
from engine.scheduler import ScheduledRows, ScheduledStep
from engine.spec.base import DraftPlan
from engine.spec.tree import ROOT, DraftTree
from engine.speculation import Drafts, Speculator
from engine.step_plan import StepPlan, plan_step, settle
from tests.spec.chaos import ChaosTuner, RandomTrees

V = 16
PROMPT = [7, 7, 4, 14]  # behind it the model is sure enough for the bound, and not surer
NUM_SEEDS = 200_000
MOST_VARIATION = 0.01

KINDS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.95},
    "min_p": {"min_p": 0.02},
    "presence": {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.6},
    "bias": {"logit_bias": {2: 1.5, 5: -2.0, 9: 1.0}},
    "allowed": {"allowed_token_ids": [0, 2, 3, 5, 8, 9, 12, 15]},
    "mixed": {
        "temperature": 1.1,
        "top_k": 7,
        "top_p": 0.97,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "logit_bias": {4: 1.0},
    },
}

ALL = DraftTree(  # every continuation of two tokens: node a, then node 16 + 16 a + b behind it
    (*range(V), *(b for _ in range(V) for b in range(V))),
    (*([ROOT] * V), *(a for a in range(V) for _ in range(V))),
)


def params_of(kind: str, seed: int | None = None) -> SamplingParams:
    return SamplingParams(  # a fourth token, so that the third may be a node two deep
        **{"max_tokens": 4, "ignore_eos": True, "temperature": 1.0, "seed": seed} | KINDS[kind]
    )


class World:
    """The model, and its logits behind the prompt and everything that may follow it, from plain prefills."""

    def __init__(self, model: Path) -> None:
        self.llm = LLM(str(model), kv_cache_bytes=1 << 22, max_model_len=512, num_threads=1)
        self.ops = self.llm.engine.runner.decoder.ops
        found: dict[tuple[int, ...], Tensor] = {}

        def keep(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
            found[tuple(prompt)] = logits.clone()
            return logits

        self.prefixes = [(), *(ALL.path(node) for node in range(len(ALL)))]
        prompts = [[*PROMPT, *prefix] for prefix in self.prefixes]
        params = SamplingParams(max_tokens=1, logits_processors=[keep])
        self.llm.generate(prompts, params, use_tqdm=False)
        self.logits = {p: found[(*PROMPT, *p)] for p in self.prefixes}

    def exact(self, kind: str) -> Tensor:
        """P(t1, t2, t3) [V, V, V], fp64."""
        params = params_of(kind)
        step = {p: exact_step(self.logits[p].double(), list(p), params) for p in self.prefixes}
        joint = torch.zeros(V, V, V, dtype=torch.float64)
        for a in range(V):
            for b in range(V):
                joint[a, b] = step[()][a] * step[(a,)][b] * step[a, b]
        return joint

    def verify_all(self, kind: str, seed: int) -> tuple[StepPlan, Tensor]:
        """One real pass of the target over the whole tree behind the prompt: its plan, and the raw logits."""
        name = f"{kind}-{seed}"
        request = Request(name, PROMPT, params_of(kind), seed=seed, max_total_len=500)
        request.pages = list(range(1 + (len(PROMPT) + len(ALL)) // 16))
        rows = (ScheduledRows(request, 0, len(PROMPT), True, len(ALL)),)
        drafts = Drafts({name: (DraftPlan("all", 2, len(ALL)), ALL)})
        plan = plan_step(ScheduledStep(rows, 1, 0, 0, ()), drafts)
        _, output = self.llm.engine.runner.forward(rows, plan.logit_rows, plan.trees)
        self.llm.engine.sampler.admit(request, [])
        return plan, output.logits.clone()

    def draw(self, kind: str, seeds: Tensor) -> Tensor:
        """Tokens [N, 3] of as many seeds, along the tree as the sampler prepared it."""
        plan, logits = self.verify_all(kind, seed=0)
        rows, params = plan.sample_rows, plan.sample_rows[0].request.params
        self.llm.engine.sampler.sample(logits, rows)  # the rules are applied in place
        count = len(seeds)
        positions = torch.tensor([row.position for row in rows], dtype=torch.int32)
        numbers = {row.path: i for i, row in enumerate(rows)}
        child = torch.tensor([[numbers.get((*row.path, t), -1) for t in range(V)] for row in rows])
        floats = [torch.full((count,), x) for x in (params.temperature, params.top_p, params.min_p)]
        top_k = torch.full((count,), params.top_k, dtype=torch.int32)
        at, tokens = torch.zeros(count, dtype=torch.int64), []
        for _ in range(3):
            out, logprobs = torch.empty(count, dtype=torch.int32), torch.empty(count)
            given = (floats[0], top_k, floats[1], floats[2], seeds, positions[at])
            self.ops.sample(logits[at], *given, out, logprobs)
            tokens.append(out.long())
            at = child[at, tokens[-1]]
        return torch.stack(tokens, dim=1)


def exact_step(logits: Tensor, output: list[int], params: SamplingParams) -> Tensor:
    """Probabilities of the next token: the definition of each parameter, one line each."""
    z = logits.clone()
    if params.allowed_token_ids is not None:
        z[[t for t in range(V) if t not in params.allowed_token_ids]] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        z[token] += bias
    for token in {*PROMPT, *output}:
        z[token] *= params.repetition_penalty if z[token] < 0 else 1 / params.repetition_penalty
    for token in set(output):
        z[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    z /= params.temperature
    keep = kept_mask(z.float(), params.top_k, params.top_p, params.min_p)
    return torch.softmax(torch.where(keep, z, -math.inf), dim=-1)


def variation(tokens: Tensor, exact: Tensor) -> float:
    """Total variation between the empirical distribution of tokens [N, 3] and the exact one."""
    index = (tokens[:, 0] * V + tokens[:, 1]) * V + tokens[:, 2]
    share = torch.bincount(index, minlength=V**3).double() / len(tokens)
    return float(0.5 * (share - exact.reshape(-1)).abs().sum())


def expected_variation(exact: Tensor, count: int) -> tuple[float, float]:
    """What a perfect sampler shows with so many draws: the mean, and a bound of the standard deviation.

    A cell's share is about normal, so its mean deviation is sqrt(2 p (1 - p) / (pi n)). One draw moves the variation
    by 1 / n at most, so its variance is at most n (1 / n)^2 / 4 (Efron and Stein).
    """
    mean = 0.5 * float(torch.sqrt(2 * exact * (1 - exact) / (math.pi * count)).sum())
    return mean, 0.5 / math.sqrt(count)


@pytest.fixture(scope="module")
def world(make_model_dir: Any) -> World:
    return World(make_model_dir("llama", vocab_size=V, bos_token_id=0, eos_token_id=1))


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_three_tokens_have_their_exact_joint_distribution(
    world: World, kind: str
) -> None:
    exact = world.exact(kind)
    assert float(exact.sum()) == pytest.approx(1.0, abs=1e-12)
    mean, deviation = expected_variation(exact, NUM_SEEDS)
    tokens = world.draw(kind, torch.arange(NUM_SEEDS))
    found = variation(tokens, exact)
    assert found < min(MOST_VARIATION, mean + 4 * deviation), (found, mean, deviation)
    assert int((exact > 1e-3).sum()) > 15, "a distribution with nothing to be wrong about"


@pytest.mark.parametrize("kind", KINDS)
def test_a_walk_of_the_whole_tree_gives_the_same_tokens(world: World, kind: str) -> None:
    """Sampler, ``plan_step``, ``settle`` and ``walk`` on one request whose draft holds every continuation."""
    seeds = torch.arange(12) * 7919
    expected = world.draw(kind, seeds).tolist()
    for seed, tokens in zip(seeds.tolist(), expected, strict=True):
        plan, logits = world.verify_all(kind, seed)
        settle(plan, world.llm.engine.sampler.sample(logits, plan.sample_rows))
        verdict = plan.verdicts[0]
        assert [sampled.token_id for sampled in verdict.drawn] == tokens
        assert len(verdict.accepted) == 2


def speculated(world: World, kind: str, count: int) -> Iterator[tuple[list[int], list[int]]]:
    """(tokens of the engine under random trees, tokens of the large draw) for each seed."""
    drawn = world.draw(kind, torch.arange(count)).tolist()
    known = {(tuple(PROMPT), seed): tokens for seed, tokens in enumerate(drawn)}
    engine = world.llm.engine
    tuner = ChaosTuner(["chaos"], max_depth=2, max_nodes=8, seed=len(kind))
    engine.speculator = Speculator([RandomTrees(known, 0.9, V, 1)], tuner, vocab_size=V)
    params = [params_of(kind, seed) for seed in range(count)]
    outputs = world.llm.generate([PROMPT] * count, params, use_tqdm=False)
    accepted = sum(len(entry.accepted) for r in tuner.records for entry in r.verified)
    assert accepted > count / 6, "nothing was speculated"
    for output, tokens in zip(outputs, drawn, strict=True):
        yield output.outputs[0].token_ids[:3], tokens


@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_the_engine_give_the_same_tokens(world: World, kind: str) -> None:
    for tokens, expected in speculated(world, kind, 200):
        assert tokens == expected


def test_requests_of_the_engine_have_the_distribution_themselves(world: World) -> None:
    """The bound is looser, as the mean and the standard deviation of so few draws say: about 0.064 + 4 x 0.009."""
    count = 3000
    exact = world.exact("temperature")
    tokens = torch.tensor([tokens for tokens, _ in speculated(world, "temperature", count)])
    mean, deviation = expected_variation(exact, count)
    found = variation(tokens, exact)
    assert found < mean + 4 * deviation, (found, mean, deviation)


def test_what_the_bounds_see_and_what_they_cannot(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs on purpose. A node drawn with its parent's noise repeats its luck; penalties that leave out the path miss
    what was drafted. Noise shifted alike for all rows is another seed: only equality with plain decoding sees that."""
    seeds = torch.arange(NUM_SEEDS)
    exact = world.exact("temperature")
    shifted = property(lambda row: 1000 + row.length + len(row.path))
    parents = property(lambda row: row.length + max(len(row.path) - 1, 0))
    flat = property(lambda row: row.length)
    with monkeypatch.context() as patch:
        plain = world.draw("temperature", seeds)
        patch.setattr(SampleRow, "position", parents)
        assert variation(world.draw("temperature", seeds), exact) > 10 * MOST_VARIATION
        patch.setattr(SampleRow, "position", flat)
        assert variation(world.draw("temperature", seeds), exact) > 10 * MOST_VARIATION
        patch.setattr(SampleRow, "position", shifted)
        moved = world.draw("temperature", seeds)
        assert variation(moved, exact) < MOST_VARIATION
        assert not torch.equal(moved, plain)
    for kind in ("presence", "mixed"):
        with monkeypatch.context() as patch:
            patch.setattr(SampleRow, "output_token_ids", lambda row: [])
            assert variation(world.draw(kind, seeds), world.exact(kind)) > 3 * MOST_VARIATION


PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "repetition_penalty": 1.7, "presence_penalty": 1.0},
    {"temperature": 0.9, "frequency_penalty": 1.2, "min_p": 0.02},
    {"temperature": 1.0, "logit_bias": {40: 6.0, 41: -6.0, 90: 3.0}},
    {"temperature": 1.0, "allowed_token_ids": list(range(30, 80))},
    {"temperature": 1.2, "bad_words": ["a", "e"]},
)
TEXTS = ("a", "the same words, the same words", "0123456789" * 3)


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [("llama", {}), ("qwen2", {}), ("qwen3", {"tie_word_embeddings": True})],
)
def test_every_log_probability_is_the_models_own(
    make_model_dir: Any, kind: str, overrides: dict[str, Any]
) -> None:
    """Raw ones, whatever penalty or bias decided the token, against teacher forcing by transformers in fp32."""
    transformers = pytest.importorskip("transformers")
    path = make_model_dir(kind, **overrides)
    llm = LLM(str(path), kv_cache_bytes=1 << 23, max_model_len=128, num_threads=1)
    vocab_size = llm.config.model.vocab_size
    texts, params = [], []
    for seed in range(len(TEXTS) * len(PARAMS)):  # 3 and 8: every text with every kind
        given = PARAMS[seed % len(PARAMS)]
        texts.append(TEXTS[seed % len(TEXTS)])
        params.append(
            SamplingParams(seed=seed, max_tokens=32, ignore_eos=True, logprobs=0, **given)
        )
    plain = llm.generate(texts, params, use_tqdm=False)
    known = {
        (tuple(output.prompt_token_ids), seed): output.outputs[0].token_ids
        for seed, output in enumerate(plain)
    }
    tuner = ChaosTuner(["chaos"], max_depth=6, max_nodes=10, seed=4)
    drafter = RandomTrees(known, 0.8, vocab_size, 5)
    llm.engine.speculator = Speculator([drafter], tuner, vocab_size=vocab_size)
    outputs = llm.generate(texts, params, use_tqdm=False)
    accepted = [e.accepted for record in tuner.records for e in record.verified]
    assert sum(map(len, accepted)) > 100
    assert any(nodes != list(range(len(nodes))) for nodes in accepted)

    worst = 0.0
    for output, logits in zip(outputs, _teacher_forced(transformers, path, outputs), strict=True):
        sample = output.outputs[0]
        expected = torch.log_softmax(logits, dim=-1)
        assert sample.logprobs is not None
        assert [list(at) for at in sample.logprobs] == [[token] for token in sample.token_ids]
        found = [
            at[token].logprob for token, at in zip(sample.token_ids, sample.logprobs, strict=True)
        ]
        gaps = [
            abs(x - float(expected[i, t]))
            for i, (t, x) in enumerate(zip(sample.token_ids, found, strict=True))
        ]
        worst = max(worst, *gaps)
        assert sample.cumulative_logprob == pytest.approx(sum(found), abs=1e-9)
    assert worst <= 1e-4, worst


def _teacher_forced(transformers: Any, path: Path, outputs: list[RequestOutput]) -> list[Tensor]:
    """Raw logits [tokens, V] of every output token by transformers; outputs of one prompt in one forward."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    found: dict[int, Tensor] = {}
    for prompt in {tuple(output.prompt_token_ids) for output in outputs}:
        some = [i for i, o in enumerate(outputs) if tuple(o.prompt_token_ids) == prompt]
        ids = torch.tensor([[*prompt, *outputs[i].outputs[0].token_ids] for i in some])
        with torch.no_grad():
            logits = model(ids).logits[:, len(prompt) - 1 : -1]
        found |= dict(zip(some, logits, strict=True))
    return [found[i] for i in range(len(outputs))]
