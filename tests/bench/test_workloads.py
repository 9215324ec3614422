"""The shapes of the benches are what their names promise, and the same every time."""

from __future__ import annotations

from collections import Counter

from bench.workloads import lean_engine_jobs, long_tail_jobs, prompt_ids, uniform_jobs


class Bytes:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def test_long_tail_is_the_published_one() -> None:
    jobs = long_tail_jobs(Bytes())
    assert Counter(job.num_tokens for job in jobs) == {32: 16, 64: 8, 128: 4, 256: 3, 768: 1}
    assert set(Counter(job.prompt_ids for job in jobs).values()) == {4}
    assert len({job.seed for job in jobs}) == 32
    assert jobs == long_tail_jobs(Bytes())


def test_prompts_differ_from_the_first_tokens_on_and_have_the_length_asked_for() -> None:
    prompts = [prompt_ids(Bytes(), i, 100) for i in range(16)]
    assert {len(p) for p in prompts} == {100}
    assert len(set(prompts)) == 16


def test_uniform_and_lean_shapes() -> None:
    assert {
        (len(j.prompt_ids), j.num_tokens)
        for j in uniform_jobs(Bytes(), num_seqs=3, prompt_len=7, num_tokens=5)
    } == {(7, 5)}
    lean = lean_engine_jobs(Bytes(), num_seqs=64, scale=0.1)
    assert all(10 <= len(j.prompt_ids) <= 102 and 10 <= j.num_tokens <= 102 for j in lean)
    assert len({j.num_tokens for j in lean}) > 20
