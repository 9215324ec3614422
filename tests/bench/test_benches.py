"""Each bench runs whole on a tiny model, checks its output first, and ends in one JSON line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.main import main
from bench.ours import OurEngine
from bench.workloads import Job

ARGUMENTS = {
    "throughput": ["--batch-sizes", "1,3", "--prompt-len", "8", "--output-len", "4"],
    "latency": ["--rows", "2,5", "--context-len", "16", "--steps", "4"],
    "prefill": ["--prompt-lens", "8,40", "--verify-len", "20"],
    "rollout": ["--scale", "0.03", "--verify-tokens", "4"],
}


@pytest.fixture(scope="module")
def small(make_model_dir) -> list[str]:
    path = make_model_dir("llama", max_position_embeddings=1024)
    return ["--model", str(path), "--dtype", "float32", "--rounds", "2", "--num-threads", "1"]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_bench_runs_verified(name: str, small: list[str], capsys) -> None:
    assert main([name, *small, *ARGUMENTS[name]]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0].startswith("check: ")
    record = json.loads(output[-1])
    assert record["bench"] == name
    assert record["verified"] is True
    assert record["machine"]["read_gb_s"] > 0
    assert record["machine"]["fp32_gflop_s"] > 0
    assert record["machine"]["arithmetic"] == "fp32 FMA"
    assert record["results"]
    assert any(line.startswith("ceilings: ") for line in output)


def test_lean_shape(small: list[str], capsys) -> None:
    arguments = ["--shape", "lean", "--num-seqs", "12", "--scale", "0.02"]
    assert main(["throughput", *small, *arguments]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["results"][0]["batch_size"] == 12


def test_latency_states_the_time_outside_kernels(small: list[str], capsys) -> None:
    assert main(["latency", *small, *ARGUMENTS["latency"]]) == 0
    overhead = json.loads(capsys.readouterr().out.splitlines()[-1])["overhead"]
    assert 0 < overhead["outside_s"] < overhead["step_s"]


@pytest.mark.parametrize("name", ["throughput", "rollout"])
def test_output_that_depends_on_the_batch_fails_the_bench(
    name: str, small: list[str], capsys, monkeypatch
) -> None:
    """The check that a bench makes is able to fail."""
    honest = OurEngine.generate

    def wrong(self, jobs, temperature):
        result = honest(self, jobs, temperature)
        if len(jobs) > 1:
            result.token_ids[0][-1] ^= 1
        return result

    monkeypatch.setattr(OurEngine, "generate", wrong)
    assert main([name, *small, *ARGUMENTS[name]]) == 1
    assert "DIFFER" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["latency", "prefill"])
def test_logits_that_depend_on_the_rows_fail_the_bench(
    name: str, small: list[str], capsys, monkeypatch
) -> None:
    honest = OurEngine.step_logits

    def wrong(self, start, token_ids):
        return honest(self, start, token_ids) + (1e-6 if len(token_ids) == 1 else 0.0)

    monkeypatch.setattr(OurEngine, "step_logits", wrong)
    assert main([name, *small, *ARGUMENTS[name]]) == 1
    assert "DIFFER" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["throughput", "--model", "/nowhere"], "/nowhere"),
        (["prefill", "--prompt-lens", "8", "--peer", "other"], "transformers or llama.cpp"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], message: str, small: list[str], capsys
) -> None:
    name, *rest = arguments
    assert main([name, *small, *rest]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


def test_transformers_peer_gives_the_same_greedy_tokens(make_model_dir) -> None:
    """Left padding, shrinking batch and all: the peer decodes what the engine decodes."""
    pytest.importorskip("transformers")
    from bench.peer_transformers import TransformersPeer

    path: Path = make_model_dir("qwen3")
    jobs = [Job((5, 6, 7), 9, 0), Job((9, 8, 7, 6, 5), 3, 0), Job((42,), 12, 0)]
    ours = OurEngine(str(path), dtype="float32", num_threads=1).generate(jobs, 0.0)
    peer = TransformersPeer(path, "float32", 1).generate(jobs, 0.0)
    assert peer.token_ids == ours.token_ids
    assert ours.num_tokens == peer.num_tokens == 24
    assert ours.tail_s is not None
    assert peer.tail_s is not None


def test_decode_split_accounts_for_all_time(tiny_llama_dir: Path) -> None:
    engine = OurEngine(str(tiny_llama_dir), dtype="float32", num_threads=1)
    original = engine.ops.linear
    steps, kernels = engine.decode_split(Job((1, 2, 3), 6, 0))
    assert len(steps) == len(kernels) == 5
    assert all(0 < kernel < step for kernel, step in zip(kernels, steps, strict=True))
    assert engine.ops.linear is original or engine.ops.linear == original
