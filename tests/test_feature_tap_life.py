"""What becomes of a FeatureTap: readers in other processes and dead ones, a full ring, failures, on and off."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM, AsyncEngine, SamplingParams
from engine.feature_tap import Features, FeatureTap
from engine.models.decoder import ForwardOutput
from engine.request import Request
from engine.tap_record import TapReader
from tests.tapped import HIDDEN, LAYERS, Job, Watcher, dense, run

JOBS: list[Job] = [
    (prompt, {"temperature": 1.0, "ignore_eos": True, "seed": i, "max_tokens": 24, "n": n})
    for i, (prompt, n) in enumerate([("a", 1), ("some words", 2), ("0123456789" * 6, 1)])
]
WIDTH = (len(LAYERS) + 1) * HIDDEN


def make_llm(model_dir: Path, **kwargs: Any) -> LLM:
    return LLM(str(model_dir), max_model_len=128, kv_cache_bytes=1 << 22, **kwargs)


def outputs(llm: LLM, watcher: Watcher | None = None) -> list[list[int]]:
    return [s.request.token_ids for g in run(llm, JOBS, watcher) for s in g.samples]


# ---- other processes


def read_all(name: str, pipe: Connection) -> None:
    """In a process of its own: takes records as they come, tells of them what a parent can check."""
    reader = TapReader(name)
    pipe.send("ready")
    found: list[tuple[str, int, list[int], bytes, str | None, bool]] = []
    while True:
        is_last = reader.writer_closed
        for record in reader.read(max_records=3):
            segment = np.frombuffer(reader._ring._map.data, np.uint8)
            is_view = np.shares_memory(record.features, segment) or not record.features.size
            is_view = is_view and np.shares_memory(record.token_ids, segment) is bool(
                record.token_ids.size
            )
            found.append(
                (
                    record.request_id,
                    record.start,
                    record.token_ids.tolist(),
                    record.features.tobytes(),
                    record.finish_reason,
                    is_view and record.features.ctypes.data % 64 == 0,
                )
            )
        reader.release()
        if is_last and reader.stats()["bytes_used"] == 0:
            break
    pipe.send(found)


def read_and_die(name: str, pipe: Connection) -> None:
    """Holds two records when it is killed."""
    reader = TapReader(name)
    records = reader.read(max_records=2)
    pipe.send([(record.request_id, record.start) for record in records])
    os.kill(os.getpid(), signal.SIGKILL)


def spawn(target: Callable[[str, Connection], None], name: str) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(name, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def test_another_process_reads_while_the_engine_runs(tiny_llama_dir: Path) -> None:
    llm = make_llm(tiny_llama_dir)
    plain = outputs(llm)
    with FeatureTap(LAYERS, capacity_bytes=1 << 20) as tap:
        process, pipe = spawn(read_all, tap.name)
        assert pipe.recv() == "ready"
        llm.reset_prefix_cache()
        llm.attach_tap(tap)
        assert outputs(llm) == plain
        llm.detach_tap()
    found = pipe.recv()
    process.join(30)
    assert tap.stats()["num_dropped_tokens"] == 0
    assert len(found) == tap.stats()["num_records"]
    ends = [entry[4] for entry in found if entry[4]]
    assert ends == ["length"] * len(plain)
    by_id = {f"job-{i}": plain[j] for i, j in ((0, 0), (2, 3))}
    by_id |= {"job-1-0": plain[1], "job-1-1": plain[2]}
    expected = {request_id: dense(llm, ids) for request_id, ids in by_id.items()}
    for request_id, start, tokens, features, _, is_view in found:
        assert is_view
        assert tokens == by_id[request_id][start : start + len(tokens)]
        rows = np.frombuffer(features, np.uint16).reshape(len(tokens), WIDTH)
        assert np.array_equal(rows, expected[request_id][start : start + len(tokens)])


def test_a_killed_reader_holds_nothing_up(tiny_llama_dir: Path) -> None:
    """What it had not released stays; the engine runs on, drops when the ring is full; the next reader goes on."""
    llm = make_llm(tiny_llama_dir, enable_prefix_caching=False)
    plain = outputs(llm)
    num_rows = sum(len(ids) - 1 for ids in plain)
    with FeatureTap(LAYERS, capacity_bytes=100 * 2 * WIDTH) as tap:
        llm.attach_tap(tap)
        assert outputs(llm) == plain
        process, pipe = spawn(read_and_die, tap.name)
        first_two = pipe.recv()
        process.join(30)
        assert process.exitcode == -signal.SIGKILL
        assert outputs(llm) == plain
        stats = tap.stats()
        assert stats["num_dropped_tokens"] > 0
        assert stats["num_tokens"] + stats["num_dropped_tokens"] == 2 * num_rows
        reader = TapReader(tap.name)
        records = reader.read()
        assert [(r.request_id, r.start) for r in records[:2]] == first_two
        reader.release()
        assert tap.stats()["bytes_used"] == 0
        assert outputs(llm) == plain
        assert reader.read()


# ---- a ring that is full


@pytest.mark.parametrize("num_rows", [9, 20, 60, 300])
def test_a_full_ring_drops_and_counts(tiny_llama_dir: Path, num_rows: int) -> None:
    """Never blocks, never changes a token; every position is there or counted; whoever was begun is ended."""
    llm = make_llm(tiny_llama_dir, enable_prefix_caching=False, max_num_batched_tokens=40)
    plain = outputs(llm)
    tap = FeatureTap(LAYERS, capacity_bytes=num_rows * 2 * WIDTH + 4096)
    llm.attach_tap(tap)
    watcher = Watcher(tap.name)
    for round_ in range(3):
        assert outputs(llm) == plain
        stats = tap.stats()
        total = (round_ + 1) * sum(len(ids) - 1 for ids in plain)
        assert stats["num_tokens"] + stats["num_dropped_tokens"] == total
        assert stats["bytes_used"] <= stats["capacity_bytes"]
        watcher.poll()
        found = sum(len(seen.tokens) for seen in watcher.seen.values())
        assert all(seen.end == "length" for seen in watcher.seen.values())
        assert found > 0
        watcher.seen.clear()
    assert tap.stats()["num_dropped_tokens"] > 0 or num_rows == 300
    assert llm.stats()["feature_tap"] == {"is_attached": True, "num_failures": 0, **tap.stats()}
    tap.close()


def test_a_slow_reader_gets_what_there_was_room_for(tiny_llama_dir: Path) -> None:
    """Gaps where records were dropped, and the end of every request that began, wherever the ring wraps."""
    llm = make_llm(tiny_llama_dir, enable_prefix_caching=False)
    plain = {f"{i}": ids for i, ids in enumerate(outputs(llm))}
    for every in (2, 3, 5, 7, 11):
        for num_rows in (12, 23, 40):
            tap = FeatureTap(LAYERS, capacity_bytes=num_rows * 2 * WIDTH + 4096)
            llm.attach_tap(tap)
            watcher = Watcher(tap.name)
            groups = [
                llm.engine.add(f"g{i}", llm._reader.read(p), SamplingParams(**g))
                for i, (p, g) in enumerate(JOBS)
            ]
            for step in range(1000):
                if not llm.engine.has_unfinished:
                    break
                llm.engine.step()
                if step % every == 0:
                    watcher.poll()
            watcher.poll()
            requests = [sample.request for group in groups for sample in group.samples]
            assert [request.token_ids for request in requests] == list(plain.values())
            found = 0
            for request in requests:
                seen = watcher.seen.get(request.request_id)
                if seen is None:
                    continue
                assert seen.end == "length"
                found += len(seen.tokens)
                assert all(request.token_ids[p] == token for p, token in seen.tokens.items())
            stats = tap.stats()
            assert found == stats["num_tokens"]
            assert found + stats["num_dropped_tokens"] == sum(
                len(ids) - 1 for ids in plain.values()
            )
            assert llm.engine.taps.num_failures == 0
            llm.detach_tap()
            tap.close()


def test_a_long_prompt_comes_in_pieces(tiny_llama_dir: Path) -> None:
    """A record takes an eighth of the ring at most: a prompt of 60 rows that ran in one step is not one of them."""
    llm = make_llm(tiny_llama_dir, enable_prefix_caching=False)
    with FeatureTap(LAYERS, capacity_bytes=80 * 2 * WIDTH) as tap:
        llm.attach_tap(tap)
        watcher = Watcher(tap.name)
        run(llm, JOBS[2:], watcher)
        assert tap.stats()["num_dropped_records"] == 0
        assert sorted(watcher.seen["job-0"].tokens) == list(range(60 + 24 - 1))
        assert tap.stats()["num_records"] > 23 + 6


# ---- what goes wrong stays here


def test_a_tap_that_fails_is_taken_off(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make_llm(tiny_llama_dir)
    plain = outputs(llm)
    tap = FeatureTap(LAYERS, capacity_bytes=1 << 20)
    llm.attach_tap(tap)
    reader = TapReader(tap.name)
    reserve, calls = tap._ring.reserve, []

    def reserve_or_fail(*args: int) -> int | None:
        calls.append(args)
        if len(calls) > 5:
            raise OSError("the disk of the machine is on fire")
        return reserve(*args)

    monkeypatch.setattr(tap._ring, "reserve", reserve_or_fail)
    assert outputs(llm) == plain
    assert llm.stats()["feature_tap"] == {"is_attached": False, "num_failures": 1}
    assert "on fire" in caplog.text
    assert tap.name in caplog.text
    assert len(reader.read()) == 5
    assert reader.writer_closed
    second = FeatureTap(LAYERS, capacity_bytes=1 << 20)
    llm.attach_tap(second)
    assert outputs(llm) == plain
    assert second.stats()["num_tokens"] > 0
    second.close()


def test_a_closed_tap_is_taken_off(tiny_llama_dir: Path) -> None:
    llm = make_llm(tiny_llama_dir)
    plain = outputs(llm)
    tap = FeatureTap(LAYERS, capacity_bytes=1 << 20)
    llm.attach_tap(tap)
    tap.close()
    tap.close()
    assert outputs(llm) == plain
    assert llm.stats()["feature_tap"] == {"is_attached": False, "num_failures": 0}
    with pytest.raises(ValueError, match="closed"):
        llm.attach_tap(tap)


def test_bad_taps_are_refused(tiny_llama_dir: Path) -> None:
    llm = make_llm(tiny_llama_dir)
    for layers in ((-1,), (True,), (1.0,), ("2",)):
        with pytest.raises(ValueError, match="tap_layers"):
            FeatureTap(layers, capacity_bytes=1 << 20)  # type: ignore[arg-type]
    for layers, capacity, message in (
        ((0, 3), 1 << 20, r"\[3\] do not exist: the target has 2 layers"),
        ((0, 1), 2048, "capacity_bytes is 2048"),
    ):
        tap = FeatureTap(layers, capacity_bytes=capacity)
        with pytest.raises(ValueError, match=message):
            llm.attach_tap(tap)
        tap.close()
    with (
        FeatureTap((0,), capacity_bytes=1 << 20) as tap,
        FeatureTap((), capacity_bytes=1 << 20) as other,
    ):
        llm.attach_tap(tap)
        with pytest.raises(ValueError, match="detach it first"):
            llm.attach_tap(other)
        with pytest.raises(ValueError, match="attached to an engine already"):
            make_llm(tiny_llama_dir).attach_tap(tap)
        assert llm.detach_tap() is tap
        assert llm.detach_tap() is None
        llm.attach_tap(other)
        outputs(llm)
        assert TapReader(other.name).read()[0].features.shape[1] == HIDDEN


# ---- on and off


def test_on_and_off_in_the_middle(tiny_llama_dir: Path) -> None:
    """Attached between two steps it starts with the rows of the next; taken off, its reader hears of it."""
    llm = make_llm(tiny_llama_dir)
    engine = llm.engine
    group = engine.add(
        "r", llm._reader.read("words"), SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
    )
    tap = FeatureTap(LAYERS, capacity_bytes=1 << 20)
    seen = []
    for first, last in ((4, 9), (13, 17)):
        while group.samples[0].request.num_output_tokens < first:
            engine.step()
        engine.attach_tap(tap)
        watcher = Watcher(tap.name)
        while group.samples[0].request.num_output_tokens < last:
            engine.step()
        assert engine.detach_tap() is tap
        watcher.poll()
        assert watcher.seen["r"].end == "detached"
        seen.append(watcher.seen["r"])
    while engine.has_unfinished:
        engine.step()
    ids = group.samples[0].request.token_ids
    assert [sorted(s.tokens) for s in seen] == [list(range(8, 13)), list(range(17, 21))]
    expected = dense(llm, ids)
    for part in seen:
        assert all(np.array_equal(expected[p], row) for p, row in part.features.items())
    tap.close()


def test_recover_forgets_all(tiny_llama_dir: Path) -> None:
    llm = make_llm(tiny_llama_dir)
    plain = outputs(llm)
    tap = FeatureTap(LAYERS, capacity_bytes=1 << 20)
    llm.attach_tap(tap)
    watcher = Watcher(tap.name)

    def interrupt(output_ids: list[int], logits: Any) -> Any:
        if len(output_ids) == 4:
            raise KeyboardInterrupt
        return logits

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two"], SamplingParams(max_tokens=9, logits_processors=[interrupt]))
    watcher.poll()
    assert [seen.end for seen in watcher.seen.values()] == ["abort", "abort"]
    assert not tap._requests
    watcher.seen.clear()
    assert outputs(llm, watcher) == plain
    assert all(seen.end == "length" for seen in watcher.seen.values())
    tap.close()


def test_a_step_that_fails_hands_nothing_out(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a forward that raised run again, and come once."""
    llm = make_llm(tiny_llama_dir, enable_prefix_caching=False)
    tap = FeatureTap(LAYERS, capacity_bytes=1 << 20)
    llm.attach_tap(tap)
    watcher = Watcher(tap.name)
    group = llm.engine.add(
        "r", llm._reader.read("words"), SamplingParams(max_tokens=8, ignore_eos=True, seed=1)
    )
    sample, num_calls = llm.engine.sampler.sample, 0

    def fail_sometimes(*args: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls % 3 == 1:
            raise MemoryError
        return sample(*args)

    monkeypatch.setattr(llm.engine.sampler, "sample", fail_sometimes)
    num_failed = 0
    while llm.engine.has_unfinished:
        try:
            llm.engine.step()
        except MemoryError:
            num_failed += 1
        watcher.poll()
    length = len(group.samples[0].request.token_ids)
    assert num_failed > 2
    assert sorted(watcher.seen["r"].tokens) == list(range(length - 1))
    tap.close()


def test_the_streaming_engine_takes_a_tap(tiny_llama_dir: Path) -> None:
    tap = FeatureTap(LAYERS, capacity_bytes=1 << 20)
    watcher = Watcher(tap.name)

    async def main(engine: AsyncEngine) -> list[int]:
        await engine.attach_tap(tap)
        params = SamplingParams(max_tokens=12, ignore_eos=True, seed=3)
        long = SamplingParams(max_tokens=110, ignore_eos=True, seed=3)
        async for _ in engine.generate("left early", long, request_id="left \udce4 early"):
            break
        output = [o async for o in engine.generate("to the end", params, request_id="whole")][-1]
        assert await engine.detach_tap() is tap
        return output.prompt_token_ids + output.outputs[0].token_ids

    with AsyncEngine(str(tiny_llama_dir), kv_cache_bytes=1 << 22, max_model_len=128) as engine:
        ids = asyncio.run(main(engine))
    watcher.poll()
    assert watcher.seen["left \udce4 early"].end == "abort"
    whole = watcher.seen["whole"]
    assert [whole.tokens[p] for p in range(len(ids) - 1)] == ids[:-1]
    assert whole.end == "length"
    tap.close()


# ---- the books, without an engine


@pytest.mark.parametrize("seed", range(8))
def test_who_was_begun_is_ended_however_full_the_ring(seed: int) -> None:
    """Room for the last record of each request is kept, wherever the ring wraps and however long its id is."""
    for case in range(50):
        rng = random.Random(1000 * seed + case)
        with FeatureTap((1,), capacity_bytes=rng.randrange(3000, 4500)) as tap:
            tap.bind(2, 8)
            watcher = Watcher(tap.name)
            num_tokens = drive(tap, watcher, rng)
            tap.end_all("abort")
            watcher.poll()
            assert all(seen.end is not None for seen in watcher.seen.values())
            found = sum(len(seen.tokens) for seen in watcher.seen.values())
            assert found + tap.stats()["num_dropped_tokens"] == num_tokens
            assert tap._ends_bytes == 0


def drive(tap: FeatureTap, watcher: Watcher, rng: random.Random) -> int:
    """Requests come, go on and end at random, the reader is mostly asleep; how many tokens were offered."""
    hidden, taps = torch.zeros(3, 8), torch.zeros(3, 1, 8)
    features = Features(ForwardOutput(torch.empty(0), hidden, taps), [0], 3)
    live: dict[int, Request] = {}
    num_tokens = 0
    for number in range(rng.randrange(20, 80)):
        slot = rng.randrange(6)
        if slot not in live:
            name = f"{number}" + "x" * (37 * slot)
            live[slot] = Request(name, [7] * 500, SamplingParams(), seed=0, max_total_len=1000)
        request, count = live[slot], rng.randrange(1, 4)
        what = rng.choice(["go on"] * 20 + ["stop", "abort"])
        if what != "go on":
            request.finish(what)  # type: ignore[arg-type]
            del live[slot]
        if what == "abort":
            tap.end(request)
        else:
            tap.emit(request, request.num_computed, range(count), features)
            request.num_computed += count
            num_tokens += count
        if rng.random() < 0.1:
            for record in watcher.reader.read(rng.randrange(1, 9)):
                watcher._take(record)
            watcher.reader.release()
    return num_tokens
