"""Structured outputs: what may follow against a brute-force oracle, trees against plain decoding, and the API's errors.

Each test names the fault it would catch.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM, SamplingParams, StructuredOutputsParams
from engine.grammar import MAX_COMPILED, Grammars, Matcher
from engine.models.loader import open_checkpoint
from engine.ops import Ops, resolve_ops
from engine.request import Request
from engine.sampler import RowError, Sampled, Sampler, SampleRow
from engine.speculation import Speculator
from engine.tokenizer import Tokenizer
from tests.conftest import VOCAB_SIZE
from tests.spec.chaos import ChaosTuner, RandomTrees

pytest.importorskip(
    "llguidance", reason="structured outputs need: pip install 'tlt-engine[grammar]'"
)

EOS = 258
CHOICES = ["yes", "yesterday", "no", 'a "b"\\', "é\n\t", "日本"]
JSON_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tiny_llama_dir: Path) -> Tokenizer:
    """One token a byte, three special tokens, and ids up to VOCAB_SIZE that the model has and it has not."""
    return Tokenizer.from_directory(tiny_llama_dir)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB_SIZE)


@pytest.fixture(scope="module")
def ops() -> Ops:
    return resolve_ops("auto", num_threads=1)


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path) -> LLM:
    return LLM(str(tiny_llama_dir), kv_cache_bytes=1 << 20, num_threads=1)


def start(
    grammars: Grammars, *, eos: Sequence[int] = (EOS,), stop: Sequence[int] = (), **kind: Any
) -> Matcher:
    return grammars.matcher(StructuredOutputsParams(**kind), frozenset(eos), stop)


def allowed(matcher: Matcher, output: Sequence[int], num_committed: int | None = None) -> set[int]:
    mask = matcher.forbidden(output, len(output) if num_committed is None else num_committed)
    assert mask is not None
    return set(np.flatnonzero(~mask).tolist())


def check_choices(tokenizer: Tokenizer, vocab_size: int, num_texts: int) -> None:
    """Every position of random texts: a token is allowed just where some choice goes on with its bytes."""
    matcher = start(Grammars(tokenizer, vocab_size), eos=[EOS], stop=[3], choice=CHOICES)
    choices = [choice.encode() for choice in CHOICES]
    token_bytes = [
        b"" if i in tokenizer.special_token_ids else tokenizer.token_bytes(i)
        for i in range(vocab_size)
    ]
    rng = random.Random(0)
    for _ in range(num_texts):
        text, output = b"", []
        while True:
            tails = [c[len(text) :] for c in choices if c.startswith(text)]
            want = {
                i for i, b in enumerate(token_bytes) if b and any(t.startswith(b) for t in tails)
            }
            want -= {EOS}
            if b"" in tails:
                want |= {EOS, 3}
            assert allowed(matcher, output, 0) == want, text
            token = rng.choice(sorted(want))
            if token in (EOS, 3):
                break
            output.append(token)
            text += token_bytes[token]
        assert text in choices


def test_allowed_tokens_are_those_that_some_choice_goes_on_with(tokenizer: Tokenizer) -> None:
    """Catches shifted bits, ids behind the tokenizer's left open, ends allowed too early or not at all."""
    check_choices(tokenizer, VOCAB_SIZE, 30)


def test_a_model_with_fewer_ids_than_its_tokenizer(tokenizer: Tokenizer) -> None:
    matcher = start(Grammars(tokenizer, 80), eos=[70], regex="[a-z]+")
    mask = matcher.forbidden([], 0)
    assert mask is not None
    assert mask.shape == (80,)
    assert allowed(matcher, []) == {
        i for i in range(80) if re.fullmatch(rb"[a-z]", tokenizer.token_bytes(i)) and i != 70
    }


@pytest.mark.smollm2
def test_allowed_tokens_of_a_real_vocabulary(smollm2_name: str) -> None:
    checkpoint = open_checkpoint(smollm2_name)
    assert checkpoint.tokenizer is not None
    check_choices(checkpoint.tokenizer, checkpoint.config.vocab_size, 4)


def test_masks_do_not_depend_on_the_nodes_that_were_asked_before(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    """A long walk with random trees, allowed and not, against a fresh matcher for every row.

    Catches a rollback that is off by one, and a node that is not allowed and breaks those after it.
    """
    rng = random.Random(1)
    kinds: list[dict[str, Any]] = [
        {"json": JSON_SCHEMA},
        {"json_object": True},
        {"regex": r"(\d{3}-)*[a-f]+"},
        {"choice": CHOICES},
    ]
    for kind in kinds:
        matcher, output = start(grammars, **kind), []
        for _ in range(25):
            for _ in range(6):
                path = [rng.choice([34, 123, 97, 48, EOS]) for _ in range(rng.randrange(3))]
                walk: list[int] = []
                for _ in range(rng.randrange(4)):  # a path that the grammar allows
                    ahead = sorted(allowed(start(grammars, **kind), output + walk) - {EOS})
                    if not ahead:
                        break
                    walk.append(rng.choice(ahead))
                row = output + walk + path
                got = matcher.forbidden(row, len(output))
                want = start(grammars, **kind).forbidden(row, len(output))
                assert (got is None) == (want is None)
                if got is not None and want is not None:
                    assert np.array_equal(got, want)
            ahead = sorted(allowed(matcher, output) - {EOS})
            if not ahead:
                break
            output.append(rng.choice(ahead))


def test_a_parser_that_gave_up_on_a_node_starts_afresh(grammars: Grammars) -> None:
    matcher = start(grammars, regex="[a-c]+")
    before = allowed(matcher, [97 - 33] * 3)
    matcher._parser.consume_token(300)
    assert matcher._parser.is_error()
    assert allowed(matcher, [97 - 33] * 3) == before


def make_request(name: str, output: Sequence[int] = (), **params: Any) -> Request:
    request = Request(
        name,
        (5, 6, 7),
        SamplingParams(**{"max_tokens": 64, **params}),
        seed=params.get("seed", 1),
        max_total_len=256,
        eos_token_ids=frozenset({EOS}),
    )
    request.token_ids += output
    return request


def make_sampler(ops: Ops, grammars: Grammars | None, rows: Sequence[SampleRow]) -> Sampler:
    sampler = Sampler(ops, vocab_size=VOCAB_SIZE, max_rows=max(1, len(rows)), grammars=grammars)
    for request in {row.request.request_id: row.request for row in rows}.values():
        sampler.admit(request)
    return sampler


def draw(
    ops: Ops, grammars: Grammars, logits: torch.Tensor, rows: Sequence[SampleRow]
) -> list[Sampled | RowError]:
    return make_sampler(ops, grammars, rows).sample(logits.clone(), rows)


def committed(request: Request) -> SampleRow:
    return SampleRow(request, len(request.token_ids))


def make_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def test_rows_of_a_tree_equal_plain_decoding_bit_for_bit(
    ops: Ops, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    """Constrained trees in one batch with unconstrained ones, against each row alone with its path committed."""
    so_far, paths = tokenizer.encode('{"na'), ["", "m", "me", 'me"', "mx", 'me": "', 'me": "q']
    trees = [tuple(tokenizer.encode(path)) for path in paths]
    structures = [{"json": JSON_SCHEMA}, None, {"json_object": True}, None]
    settings: list[dict[str, Any]] = [
        {"temperature": 1.0, "logprobs": 3},
        {"temperature": 0.7, "top_k": 9, "presence_penalty": 0.5, "logprobs": 2},
        {"temperature": 0.0, "logit_bias": {34: 3.0}},
        {"temperature": 1.3, "min_p": 0.01, "logprobs": 0},
    ]
    kinds = [
        {**params, "structured_outputs": structure, "seed": 11 + i}
        for i, (params, structure) in enumerate(zip(settings, structures, strict=True))
    ]
    requests = [make_request(f"r{i}", so_far, **kind) for i, kind in enumerate(kinds)]
    rows = [SampleRow(r, len(r.token_ids), path) for path in trees for r in requests]
    random.Random(3).shuffle(rows)
    logits = make_logits(len(rows))
    together = draw(ops, grammars, logits, rows)
    assert draw(ops, grammars, logits.flip(0), rows[::-1]) == together[::-1]
    num_unreachable = 0
    for i, row in enumerate(rows):
        plain = make_request("plain", [*so_far, *row.path], **kinds[requests.index(row.request)])
        alone = draw(ops, grammars, logits[i : i + 1], [committed(plain)])[0]
        if isinstance(alone, RowError):  # "mx" is no key of the schema: no sample leads there
            num_unreachable += 1
            assert isinstance(together[i], Sampled)
        else:
            assert together[i] == alone
    assert num_unreachable == 1


def test_frequencies_are_the_renormalised_probabilities(ops: Ops, grammars: Grammars) -> None:
    """Catches a mask that leads to a retry, a bias, or a redraw in place of renormalisation."""
    logits, num_draws = make_logits(1, seed=5), 4000
    rows = [
        committed(make_request(f"r{i}", seed=i, structured_outputs={"regex": "a|b|c"}))
        for i in range(num_draws)
    ]
    results = draw(ops, grammars, logits.expand(num_draws, -1), rows)
    drawn = [r.token_id for r in results if isinstance(r, Sampled)]
    ids = [64, 65, 66]  # a, b, c in the byte alphabet
    assert set(drawn) <= set(ids)
    want = torch.softmax(logits[0, ids], -1)
    for token, p in zip(ids, want.tolist(), strict=True):
        assert abs(drawn.count(token) / num_draws - p) < 4.5 * (p * (1 - p) / num_draws) ** 0.5


def test_raw_logprobs_stay_raw(ops: Ops, grammars: Grammars) -> None:
    logits = make_logits(1)
    request = make_request("r", logprobs=4, structured_outputs={"choice": ["zz"]})
    result = draw(ops, grammars, logits, [committed(request)])[0]
    assert isinstance(result, Sampled)
    assert result.logprobs is not None
    raw = torch.log_softmax(logits[0], -1)
    for token, entry in result.logprobs.items():
        assert entry.logprob == pytest.approx(float(raw[token]), abs=1e-5)


def test_processors_see_the_grammar_and_cannot_break_it(ops: Ops, grammars: Grammars) -> None:
    seen: list[int] = []

    def overwrite(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(int(logits.isfinite().sum()))
        return torch.full_like(logits, 0.0).index_fill(0, torch.tensor([70]), 99.0)

    request = make_request(
        "r", structured_outputs={"regex": "[ab]"}, logits_processors=[overwrite], temperature=0.0
    )
    result = draw(ops, grammars, make_logits(1), [committed(request)])[0]
    assert isinstance(result, Sampled)
    assert (seen, result.token_id) == ([2], 64)


def test_a_row_where_nothing_may_follow_fails_alone(ops: Ops, grammars: Grammars) -> None:
    """min_tokens forbids the end, the grammar all else."""
    bad = make_request("bad", [64], min_tokens=4, structured_outputs={"regex": "a"})
    left = make_request("left", [65], structured_outputs={"regex": "a"})
    good = make_request("good")
    logits = make_logits(3)
    rows = [committed(request) for request in (bad, left, good)]
    results = draw(ops, grammars, logits, rows)
    assert "structured_outputs" in str(results[0])
    assert "output token 0 (65) is not allowed" in str(results[1])
    assert results[2] == draw(ops, grammars, logits[2:], [committed(good)])[0]


def test_behind_an_end_all_is_allowed(grammars: Grammars) -> None:
    """As in vLLM with ignore_eos; and nodes behind an end must not fail, since a walk does reach them."""
    matcher = start(grammars, stop=[257], regex="a")
    assert allowed(matcher, [64]) == {EOS, 257}
    for end in (EOS, 257):
        assert matcher.forbidden([64, end], 2) is None
        assert matcher.forbidden([64, end, 9], 1) is None
    assert allowed(matcher, [64], 1) == {EOS, 257}


def test_an_end_that_is_text_as_well_is_an_end(grammars: Grammars) -> None:
    matcher = start(grammars, eos=[65], regex="[ab]+")
    assert allowed(matcher, []) == {64}
    assert allowed(matcher, [64]) == {64, 65}
    assert matcher.forbidden([64, 65, 80], 3) is None


def test_an_id_without_text_is_not_followed(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """The first of them is the end that the library was told of: it must not take it from a drafter."""
    matcher = start(grammars, regex="a+")
    for token in (tokenizer.vocab_size, VOCAB_SIZE - 1):
        assert matcher.forbidden([64, token], 0) is None
        assert allowed(matcher, [64], 0) == {64, EOS}
        assert allowed(matcher, [], 0) == {64}


def texts(llm: LLM, structured_outputs: Any, **params: Any) -> list[str]:
    params = {"max_tokens": 200, "n": 8, "seed": 0, "temperature": 1.5, **params}
    output = llm.generate("go", SamplingParams(structured_outputs=structured_outputs, **params))
    return [sample.text for sample in output[0].outputs]


def check_person(text: str) -> None:
    person = json.loads(text)
    assert list(person) == ["name", "age", "tags"]
    assert isinstance(person["name"], str)
    assert len(person["name"]) <= 8
    assert type(person["age"]) is int
    assert 0 <= person["age"] <= 120
    assert set(person["tags"]) <= {"x", "y"}
    assert len(person["tags"]) <= 3


@pytest.mark.parametrize("schema", [JSON_SCHEMA, json.dumps(JSON_SCHEMA)], ids=["dict", "text"])
def test_json_of_a_model_that_knows_no_json(llm: LLM, schema: Any) -> None:
    structure = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    found = texts(llm, structure)
    assert len(set(found)) > 4
    for text in found:
        check_person(text)
        assert not re.search(r"[:,]\s|[{}\[\]]\s", re.sub(r'"(\\.|[^"\\])*"', "", text))


def test_regex_choice_and_grammar_hold_for_the_whole_text(llm: LLM) -> None:
    for regex in (r"[0-9]{3}/[a-f]{2,5}!?", "(ab|cd)+x"):
        for text in texts(llm, {"regex": regex}):
            assert re.fullmatch(regex, text)
    found = set(texts(llm, {"choice": CHOICES}, n=32))
    assert found <= set(CHOICES)
    assert len(found) > 2
    for grammar in ('start: "x" NUM\nNUM: /[0-9]{2}/', 'root ::= "x" [0-9] [0-9]'):
        assert all(re.fullmatch(r"x\d\d", text) for text in texts(llm, {"grammar": grammar}))
    for text in texts(llm, {"json_object": True}, max_tokens=4):
        assert text.startswith("{")


def test_samples_do_not_depend_on_the_batch_or_on_preemption(
    tiny_llama_dir: Path, llm: LLM
) -> None:
    structures = [{"json": JSON_SCHEMA}, None, {"regex": "[a-z ]{150}"}, {"choice": CHOICES}]
    params = [
        SamplingParams(max_tokens=180, seed=i, structured_outputs=s)
        for i, s in enumerate(structures * 2)
    ]
    alone = [llm.generate("go", p)[0].outputs[0].token_ids for p in params]
    tight = LLM(
        str(tiny_llama_dir), kv_cache_bytes=1 << 18, num_threads=1, max_num_batched_tokens=32
    )
    outputs = tight.generate(["go"] * len(params), params)
    assert [o.outputs[0].token_ids for o in outputs] == alone
    assert tight.stats()["num_preemptions"] > 0
    assert not tight.engine.sampler._rules


def test_speculation_changes_no_bit(tiny_llama_dir: Path, llm: LLM) -> None:
    """Random trees, true for a while, over constrained and free requests; ends inside trees, ignored ends as well.

    Catches a matcher that stays where a rejected node left it.
    """
    structures: list[Any] = [{"json": JSON_SCHEMA}, {"regex": "[a-z ]{30}"}, None]
    structures += [{"choice": CHOICES}, {"json_object": True}]
    params = [
        SamplingParams(
            max_tokens=60,
            seed=i,
            structured_outputs=structures[i % 5],
            ignore_eos=i % 3 == 0,
            logprobs=2,
            stop_token_ids=[257] if i % 2 else None,
        )
        for i in range(15)
    ]
    alone = [llm.generate("go", p)[0] for p in params]
    records = {(tuple(o.prompt_token_ids), i): o.outputs[0].token_ids for i, o in enumerate(alone)}
    fast = LLM(str(tiny_llama_dir), kv_cache_bytes=1 << 19, num_threads=1, max_num_seqs=6)
    for seed, truth in enumerate((0.5, 0.9, 1.0)):
        tuner = ChaosTuner(["chaos"], max_depth=6, max_nodes=10, seed=seed)
        drafter = RandomTrees(records, truth, VOCAB_SIZE, seed)
        fast.engine.speculator = Speculator([drafter], tuner, vocab_size=VOCAB_SIZE)
        outputs = fast.generate(["go"] * len(params), params, use_tqdm=False)
        for got, want in zip(outputs, alone, strict=True):
            assert got.outputs == want.outputs
        accepted = [v.accepted for record in tuner.records for v in record.verified]
        assert sum(map(len, accepted)) > 50


def test_ends(llm: LLM) -> None:
    """finish_reason, stop tokens as ends, and what ignore_eos leaves."""
    one = SamplingParams(structured_outputs={"choice": ["yes"]}, seed=0)
    sample = llm.generate("go", one)[0].outputs[0]
    assert (sample.text, sample.finish_reason, sample.token_ids[-1]) == ("yes", "stop", EOS)
    ignoring = SamplingParams(
        structured_outputs={"choice": ["yes"]}, seed=0, ignore_eos=True, max_tokens=9
    )
    sample = llm.generate("go", ignoring)[0].outputs[0]
    assert sample.text.startswith("yes")
    assert sample.token_ids[3] == EOS
    assert (len(sample.token_ids), sample.finish_reason) == (9, "length")
    impossible = SamplingParams(structured_outputs={"choice": ["yes"]}, min_tokens=8, seed=0)
    sample = llm.generate("go", impossible)[0].outputs[0]
    assert (sample.text, sample.finish_reason) == ("yes", "error")
    assert "structured_outputs" in str(sample.stop_reason)


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({}, "got none of them"),
        ({"regex": "a", "choice": ["a"]}, "got regex and choice"),
        ({"json_object": False}, "got none of them"),
        ({"json_object": 3}, "json_object must be True or False"),
        ({"jsn": {}}, "did you mean json"),
        ({"json": "{"}, r"structured_outputs\.json is no JSON"),
        ({"json": "[1]"}, "must be an object"),
        ({"json": 3}, "is no JSON"),
        ({"json": {"a": float("nan")}}, "is no JSON"),
        ({"regex": ""}, "regex must be non-empty text"),
        ({"choice": []}, "choice must be a list"),
        ({"choice": "yes"}, "choice must be a list"),
        ({"choice": ["a", ""]}, "choice must be a list"),
        ("[a-z]", "must be StructuredOutputsParams or a dict"),
        ({1: 2}, "must be StructuredOutputsParams or a dict"),
    ],
)
def test_bad_structures_are_refused_at_once(structure: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(structured_outputs=structure)


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"json": {"type": "wat"}}, r"\.json cannot be used.*wat"),
        ({"json": {"not": {"type": "string"}}}, r"\.json cannot be used.*not"),
        ({"json": {"allOf": [False]}}, r"\.json cannot be used"),
        ({"regex": "(a"}, r"\.regex cannot be used.*unclosed group.*got '\(a'"),
        ({"regex": "a(?=b)"}, r"\.regex cannot be used"),
        ({"regex": r"[a&&b]"}, r"\.regex cannot be used"),
        ({"grammar": "start: nothing"}, r"\.grammar cannot be used.*nothing"),
        ({"grammar": 'root ::= "a'}, r"\.grammar cannot be used"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_anything_runs(
    llm: LLM, structure: Any, message: str
) -> None:
    good = SamplingParams(max_tokens=2)
    steps = llm.stats()["num_target_steps"]
    with pytest.raises(ValueError, match=message):
        llm.generate(["a", "b"], [good, SamplingParams(structured_outputs=structure, n=2)])
    assert llm.stats()["num_target_steps"] == steps
    assert not llm.engine.sampler._rules
    assert not llm.engine.has_unfinished


def test_what_the_model_or_the_machine_lacks_is_named(
    ops: Ops, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request("r", structured_outputs={"regex": "a"})
    with pytest.raises(ValueError, match="the model has no tokenizer"):
        make_sampler(ops, None, [committed(request)])
    with pytest.raises(ValueError, match="give stop_token_ids"):
        start(Grammars(tokenizer, VOCAB_SIZE), eos=[], regex="a")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"pip install 'tlt-engine\[grammar\]'"):
        make_sampler(ops, Grammars(tokenizer, VOCAB_SIZE), [committed(request)])


def test_equal_grammars_are_compiled_once_and_few_are_kept(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = Grammars(tokenizer, VOCAB_SIZE)
    for schema in (JSON_SCHEMA, json.dumps(JSON_SCHEMA), dict(JSON_SCHEMA)):
        start(grammars, json=schema)
    assert grammars._compiled.cache_info().misses == 1
    for i in range(MAX_COMPILED + 3):
        start(grammars, regex=f"a{{{i + 1}}}")
    assert grammars._compiled.cache_info().currsize == MAX_COMPILED


def test_requests_that_share_a_grammar_do_not_share_a_place_in_it(grammars: Grammars) -> None:
    one, two = start(grammars, regex="ab"), start(grammars, regex="ab")
    assert allowed(one, [64]) == {65}
    assert allowed(two, []) == {64}


@pytest.mark.smollm2
def test_json_of_a_real_model(smollm2_name: str) -> None:
    """Catches masks of a vocabulary with multi-byte tokens that tear characters or keys apart."""
    model = LLM(smollm2_name, kv_cache_bytes=1 << 27)
    prompt = "A person as JSON with name, age and tags: "
    params = SamplingParams(structured_outputs={"json": JSON_SCHEMA}, seed=2, n=4, max_tokens=96)
    for sample in model.generate(prompt, params)[0].outputs:
        assert sample.finish_reason == "stop"
        check_person(sample.text)
