"""A replay says, to the token and step by step, what the engine then does; and it says where a file is bad."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.cli import main
from engine.replay import Turn, plain, replay
from engine.replay_report import AtDepth, Tally, by_depth, by_length, expected, phases, tally
from engine.rollout_file import RolloutSample, read_rollout, write_rollout
from engine.spec.config import SpeculativeConfig
from engine.spec.oracle import read_records
from engine.spec.price import TargetPrice
from engine.spec.tree import ROOT, DraftTree
from engine.spec.tuner import FixedTuner, StepRecord
from engine.spec_assembly import build_speculator

PROMPTS = ([1, 2, 3, 1, 2, 3, 1], [7, 8, 9, 7], [5] * 40)
PARAMS = (  # repetitive and not, ended by length, by the model's own end, by a stop string
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.3, "top_k": 3, "ignore_eos": True},
    {"temperature": 1.0, "stop_token_ids": list(range(60, 100)), "min_tokens": 9},
    {"temperature": 0.4, "allowed_token_ids": [40, 41, 42], "stop": ["(())", "(*)"]},
)
COMMON: dict[str, Any] = {"max_model_len": 128, "num_threads": 1, "kv_cache_bytes": 1 << 22}


@pytest.fixture(scope="module")
def rollout(tiny_llama_dir: Path) -> list[RolloutSample]:
    """What the plain engine makes of every prompt with every kind of parameters, three samples each."""
    llm = LLM(str(tiny_llama_dir), **COMMON)
    samples: list[RolloutSample] = []
    for prompt in PROMPTS:
        for kind, given in enumerate(PARAMS):
            params = SamplingParams(n=3, seed=10 * kind, max_tokens=48, **given)
            output = llm.generate([prompt], params, use_tqdm=False)[0]
            for i, one in enumerate(output.outputs):
                line, seed = len(samples) + 1, 10 * kind + i
                ids = tuple(one.token_ids)
                samples.append(
                    RolloutSample(line, tuple(prompt), seed, ids, params, one.finish_reason)
                )
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    return samples


@pytest.fixture(scope="module")
def rollout_file(rollout: list[RolloutSample], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rollout") / "rollout.jsonl"
    write_rollout(path, rollout)
    return path


def config_of(drafter: str, rollout_file: Path, **more: Any) -> SpeculativeConfig:
    method, _, detail = drafter.partition(":")
    given: dict[str, Any] = {"num_speculative_tokens": 6, "tuner": "fixed", "method": method}
    if method == "oracle":
        given |= {"trace": str(rollout_file), "acceptance": float(detail)}
    return SpeculativeConfig(**given | more)


class Log(FixedTuner):
    """Writes down what every step verified and how far each walk came."""

    def __init__(self, tuner: Any) -> None:
        self._plan = tuner._plan
        self.steps: list[list[tuple[str, DraftTree]]] = []
        self.seconds: list[float] = []

    def observe(self, record: StepRecord) -> None:
        self.seconds.append(record.target_s)
        if record.num_decoding:
            self.steps.append([(e.request_id, e.tree) for e in record.verified])


def really(
    model: Path, samples: list[RolloutSample], config: SpeculativeConfig, batch_size: int
) -> tuple[list[list[DraftTree]], dict[int, list[int]]]:
    """What the real engine does: the trees of each step, and by sample how often it committed how many drafts."""
    llm = LLM(str(model), max_num_seqs=batch_size, speculative_config=config, **COMMON)  # type: ignore[arg-type]
    log = llm.engine.speculator.tuner = Log(llm.engine.speculator.tuner)
    params = [dataclasses.replace(s.params, n=1, seed=s.seed) for s in samples]
    outputs = llm.generate([list(s.prompt_token_ids) for s in samples], params, use_tqdm=False)
    assert [tuple(o.outputs[0].token_ids) for o in outputs] == [s.token_ids for s in samples]
    histograms = {}
    for sample, output in zip(samples, outputs, strict=True):
        metrics = output.metrics[0].speculative_decoding
        assert metrics is not None
        histograms[sample.line] = list(metrics.acceptance_histogram)
    return [[tree for _, tree in step] for step in log.steps], histograms


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(
    ("drafter", "more"),
    [("suffix", {}), ("suffix", {"top_k": 2, "num_nodes": 9}), ("oracle:0.8", {})],
)
def test_what_is_predicted_is_what_the_engine_does(
    tiny_llama_dir: Path,
    rollout: list[RolloutSample],
    rollout_file: Path,
    drafter: str,
    more: dict[str, Any],
    batch_size: int,
) -> None:
    """Trees of every step, and accepted tokens of every step of every sample."""
    config = config_of(drafter, rollout_file, **more)
    trees, histograms = really(tiny_llama_dir, rollout, config, batch_size)
    llm = LLM(str(tiny_llama_dir), **COMMON)
    speculator = build_speculator(config, llm.config, llm.engine.runner)
    log = speculator.tuner = Log(speculator.tuner)
    found = replay(llm, rollout, speculator, TargetPrice(), batch_size=batch_size)
    assert [[tree for _, tree in step] for step in log.steps] == trees
    for sample in rollout:
        counts = [t.num_accepted for t in found.turns if t.request_id == f"line {sample.line}"]
        histogram = [counts.count(a) for a in range(max(counts, default=0) + 1)]
        histogram[0] += 1  # the prompt's own step
        assert histogram == histograms[sample.line], sample
    assert found.num_different == 0
    assert log.seconds == [p.target_s for p in found.passes], "the tuner was told other prices"
    assert tally(found.turns).num_accepted > 100
    assert llm.engine.counters.num_target_steps == 0, "the target was run"


def test_an_oracle_that_knows_everything_is_never_refused(
    tiny_llama_dir: Path, rollout: list[RolloutSample], rollout_file: Path
) -> None:
    llm = LLM(str(tiny_llama_dir), **COMMON)
    config = config_of("oracle:1.0", rollout_file)
    speculator = build_speculator(config, llm.config, llm.engine.runner)
    found = replay(llm, rollout, speculator, TargetPrice(), batch_size=8)
    at_depth = by_depth(found.turns)
    assert [d.depth for d in at_depth] == [1, 2, 3, 4, 5, 6]
    assert all(d.conditional == 1.0 for d in at_depth)
    for turn in (
        found.turns
    ):  # all of it, but for the token that ends the sample: that one counts as the bonus
        assert turn.num_accepted in (len(turn.tree), len(turn.tree) - turn.finished)


def test_a_rollout_is_the_same_for_every_tuner_and_costs_what_its_passes_cost(
    tiny_llama_dir: Path, rollout: list[RolloutSample], rollout_file: Path
) -> None:
    llm = LLM(str(tiny_llama_dir), **COMMON)
    flat = TargetPrice({1: 0.01, 64: 0.0101})  # rows are free, so drafting must win
    bare = plain(llm, rollout, flat)
    longest = max(len(sample.token_ids) for sample in rollout)
    assert len(bare.passes) == longest
    assert all(turn.gained == 1 for turn in bare.turns)
    assert sum(phase.num_steps for phase in phases(bare.passes)) == longest
    for tuner in ("cost", "beg"):
        config = config_of("oracle:0.9", rollout_file, tuner=tuner)
        speculator = build_speculator(config, llm.config, llm.engine.runner)
        found = replay(llm, rollout, speculator, flat, batch_size=len(rollout))
        assert sum(t.gained for t in found.turns) == sum(t.gained for t in bare.turns)
        priced = [flat.seconds(p.num_rows, 0) for p in found.passes]
        assert [p.target_s for p in found.passes] == pytest.approx(priced)
    tokens = sum(len(sample.token_ids) for sample in rollout)
    assert found.num_tokens == bare.num_tokens == tokens


def test_tallies_follow_their_definitions() -> None:
    """Chains and a tree by hand; the last turn of a request says nothing of a token behind its end."""
    chain, fork = DraftTree.chain([1, 2, 3]), DraftTree((1, 2, 3), (ROOT, ROOT, 0))
    turns = [
        Turn("a", 0, 5, 3, chain, 1, False),  # two of three
        Turn("a", 63, 8, 1, chain, ROOT, False),  # none
        Turn("a", 64, 9, 2, fork, 1, False),  # a leaf: nothing was proposed behind it
        Turn("a", 70, 9, 2, chain, 0, True),  # cut by the end
        Turn("b", 2, 9, 1, DraftTree(), ROOT, False),
    ]
    assert by_depth(turns) == [
        AtDepth(1, 4, 3 / 4, 3 / 4),
        AtDepth(2, 1, 1.0, 1 / 4),
        AtDepth(3, 1, 0.0, 0.0),
    ]
    assert by_length(turns) == {"0-64": Tally(3, 2, 5, 6, 2), "64-256": Tally(2, 2, 4, 6, 2)}
    assert tally(turns).length == 9 / 5


def test_expected_times_are_those_of_the_price_list(
    tiny_llama_dir: Path, rollout: list[RolloutSample], rollout_file: Path
) -> None:
    llm = LLM(str(tiny_llama_dir), **COMMON)
    config = config_of("oracle:1.0", rollout_file, num_speculative_tokens=3)
    speculator = build_speculator(config, llm.config, llm.engine.runner)
    price = TargetPrice({1: 0.010, 64: 0.010 + 63 * 0.002})
    found = replay(llm, rollout, speculator, price, batch_size=4)
    total = tally(found.turns)
    each = total.num_proposed / total.num_turns
    for row in expected(found, price):
        rows = row.batch_size * (1 + each)
        assert row.plain_ms == pytest.approx(10 + 2 * (row.batch_size - 1))
        assert row.target_ms == pytest.approx(10 + 2 * (rows - 1), rel=1e-6)
        step_s = 1e-3 * (row.target_ms + row.draft_ms)
        rate = row.batch_size * total.length / step_s
        assert row.speed_up == pytest.approx(rate / (row.batch_size / (1e-3 * row.plain_ms)))


def test_a_file_comes_back_as_it_was_written(
    rollout: list[RolloutSample], rollout_file: Path
) -> None:
    again = read_rollout(rollout_file)
    assert len(again) == len(rollout)
    for sample, read in zip(rollout, again, strict=True):
        params = dataclasses.replace(sample.params, n=1, seed=sample.seed)
        assert read == dataclasses.replace(sample, params=params)
    records = read_records(rollout_file)
    assert [(r.prompt_token_ids, r.seed, r.output_token_ids) for r in records] == [
        (s.prompt_token_ids, s.seed, s.token_ids) for s in rollout
    ]


def test_parameters_of_every_kind_can_be_written(tmp_path: Path) -> None:
    params = SamplingParams(
        seed=3,
        max_tokens=None,
        logit_bias={5: 1.5, 7: -2.0},
        bad_words=["no"],
        structured_outputs={"regex": "[ab]+"},
        speculation=3,
        logprobs=2,
    )
    sample = RolloutSample(1, (1, 2), 3, (4,), params, None, "m")
    write_rollout(tmp_path / "r.jsonl", [sample])
    read = read_rollout(tmp_path / "r.jsonl")[0]
    assert read.params == dataclasses.replace(params, speculation=True, logprobs=None)


GOOD = '{"prompt_token_ids": [1, 2], "seed": 1, "token_ids": [3, 4]}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2"),
        ("[" * 100_000, "line 2"),
        ("[1]", "line 2: it must be a JSON object, got list"),
        ('{"seed": 1}', "line 2: prompt_token_ids is missing"),
        ('{"prompt_token_ids": [], "seed": 1, "token_ids": [1]}', "at least one token id"),
        ('{"prompt_token_ids": [1.5], "seed": 1, "token_ids": [1]}', r"prompt_token_ids\[0\]"),
        ('{"prompt_token_ids": [1], "seed": -1, "token_ids": [1]}', "line 2: seed must be"),
        ('{"prompt_token_ids": [1], "seed": null, "token_ids": [1]}', "line 2: seed must be"),
        (GOOD, "line 2: it has the prompt and the seed of line 1"),
        (GOOD[:-1] + ', "sampling": {"temprature": 1}}', "line 2: unknown sampling parameter"),
        (GOOD[:-1] + ', "sampling": {"max_tokens": 1}}', "line 2: token_ids has 2 tokens"),
        (GOOD[:-1] + ', "sampling": 3}', "line 2: sampling must be an object"),
        (GOOD[:-1] + ', "model": 3}', "line 2: model must be text"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(GOOD + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message) as caught:
        read_rollout(path)
    assert str(path) in str(caught.value)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["replay", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


ENGINE = ("--kv-cache-bytes", "4000000", "--num-threads", "1", "--max-model-len", "128")


def test_record_then_score(
    tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(
        '{"prompt": "ab ab ab ab"}\n\n{"prompt_token_ids": [1, 2, 3]}\n'
        '{"messages": [{"role": "user", "content": "hi"}]}\n"ab ab ab ab"\n'
    )
    model = ("--model", str(tiny_llama_dir), *ENGINE)
    given = ("--prompts", str(prompts), "-n", "3", "--max-tokens", "40", "--temperature", "0.2")
    status, out, err = run(capsys, "record", *model, *given, "--output", str(output))
    assert status == 0, err
    samples = read_rollout(output)
    assert (
        out
        == f"12 samples of 4 prompts, {sum(len(s.token_ids) for s in samples)} tokens: {output}\n"
    )
    assert samples[0].model == str(tiny_llama_dir)
    assert samples[0].params.temperature == 0.2
    assert samples[0].prompt_token_ids == samples[9].prompt_token_ids
    assert [s.seed for s in samples] == list(range(12))
    status, out, err = run(capsys, "score", str(output), *model, "--tuner", "cost")
    assert status == 0, err
    assert "exact: every draft was compared with the recording" in out
    result = json.loads(out.splitlines()[-1])
    assert result["num_accepted_draft_tokens"] > 0
    assert [row["batch_size"] for row in result["expected"]] == [1, 2, 4, 8, 16, 32]
    assert result["rollout"]["num_steps"] <= result["rollout"]["num_plain_steps"]


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_head_is_scored_on_the_real_target(
    kind: str,
    tiny_llama_dir: Path,
    make_model_dir: Any,
    rollout_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = make_model_dir("llama", num_hidden_layers=6)  # enough layers to tap three
    rollout = str(tmp_path / "r.jsonl")
    model = ("--model", str(target), *ENGINE)
    prompts = tmp_path / "p.txt"
    prompts.write_text("one two\nthree\n")
    given = ("--prompts", str(prompts), "-n", "2", "--max-tokens", "20")
    assert run(capsys, "record", *model, *given, "--output", rollout)[0] == 0
    head = str(tmp_path / "head")
    arguments = ["drafter", "init", "--target", str(target), "--kind", kind, "--output", head]
    assert main([*arguments, "--dtype", "float32"]) == 0
    capsys.readouterr()
    drafter = ("--drafter", f"{kind}:{head}", "--num-speculative-tokens", "3")
    status, out, err = run(capsys, "score", rollout, *model, *drafter, "--tuner", "cost")
    assert status == 0, err
    assert "exact: the target ran with the recorded seeds" in out
    result = json.loads(out.splitlines()[-1])
    assert result["num_draft_tokens"] > 50
    assert result["num_different"] == 0
    # another model than that of the recording: the score is not exact, and it says so
    other = ("--model", str(make_model_dir("llama", num_hidden_layers=6, rope_theta=77.0)), *ENGINE)
    status, out, err = run(capsys, "score", rollout, *other, *drafter)
    assert status == 1, err
    assert "NOT EXACT" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["score", "/no/such/file"], "/no/such/file"),
        (["score", "BAD"], "line 1"),
        (["score", "GOOD", "--drafter", "magic"], "--drafter"),
        (["score", "GOOD", "--drafter", "oracle:often"], "--drafter"),
        (["score", "GOOD", "--drafter", "eagle3"], "model must be"),
        (["score", "GOOD", "--batch-size", "0"], "--batch-size"),
        (["score", "GOOD", "--max-model-len", "16"], "line 1"),
        (["score", "WIDE"], "line 1: token id 5000"),
        (["record", "--output", "/no/such/directory/x"], "--output"),
        (["record", "--output", "OUT", "--prompts", "/no/such/file"], "--prompts"),
        (["record", "--output", "OUT", "--prompts", "BAD"], "line 1"),
        (["record", "--output", "OUT", "--prompts", "TWO"], "line 2"),
    ],
)
def test_bad_input_is_one_line_that_names_it(
    tiny_llama_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    texts = {
        "BAD": "{}\n",
        "GOOD": GOOD.replace("[3, 4]", str([3] * 20)) + "\n",
        "WIDE": GOOD.replace("4]", "5000]") + "\n",
        "TWO": '"a"\n{"prompt_token_ids": [1, 999999]}\n',
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in (*texts, "OUT")}
    arguments = [paths.get(argument, argument) for argument in arguments]
    status, out, err = run(capsys, *arguments, "--model", str(tiny_llama_dir))
    assert status == 2
    assert out == ""
    assert err.startswith("tlt replay: ")
    assert err.count("\n") == 1
    assert message in err
    assert not Path(paths["OUT"]).exists()
