"""The streaming API: partial outputs, cancelling, ids, errors that reach everybody who waits."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from engine import LLM, AsyncEngine, RequestOutput, SamplingParams


@pytest.fixture(scope="module")
def engine(tiny_llama_dir: Path) -> Iterator[AsyncEngine]:
    with AsyncEngine(str(tiny_llama_dir), kv_cache_bytes=1 << 20, num_threads=1) as engine:
        yield engine


async def collect(engine: AsyncEngine, *args: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(*args)]


def slowly(token_ids: list[int], logits: Tensor) -> Tensor:
    """A processor that keeps a request alive for long enough to be caught running."""
    time.sleep(0.002)
    return logits


def long_params(**more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=400, ignore_eos=True, logits_processors=[slowly], **more)


def idle(engine: AsyncEngine) -> bool:
    scheduler = engine.engine.scheduler
    return not scheduler.has_unfinished and scheduler.kv.num_used_pages == 0


def test_stream_grows_to_what_generate_gives(engine: AsyncEngine, tiny_llama_dir: Path) -> None:
    params = SamplingParams(max_tokens=12, seed=3, n=2, ignore_eos=True, logits_processors=[slowly])
    stream = asyncio.run(collect(engine, "hello", params))
    llm = LLM(str(tiny_llama_dir), kv_cache_bytes=1 << 20, num_threads=1)
    expected = llm.generate("hello", params)[0]
    assert [c.token_ids for c in stream[-1].outputs] == [c.token_ids for c in expected.outputs]
    assert stream[-1].finished
    assert not stream[0].finished
    for before, after in zip(stream, stream[1:], strict=False):
        for old, new in zip(before.outputs, after.outputs, strict=True):
            assert new.text.startswith(old.text)
            assert new.token_ids[: len(old.token_ids)] == old.token_ids


def test_streams_that_speculate_are_those_that_do_not(
    engine: AsyncEngine, tiny_llama_dir: Path
) -> None:
    """Streams come and go, one is cancelled: tokens do not change, drafts are accepted, nothing is left behind."""
    params = [
        SamplingParams(max_tokens=40, seed=i, temperature=0.2, ignore_eos=True) for i in range(6)
    ]

    async def run(some: AsyncEngine) -> list[list[int]]:
        victim = asyncio.create_task(collect(some, "abab", long_params(seed=9)))
        streams = await asyncio.gather(*(collect(some, "abababab", p) for p in params))
        victim.cancel()
        await asyncio.gather(victim, return_exceptions=True)
        return [stream[-1].outputs[0].token_ids for stream in streams]

    config = {"method": "suffix", "tuner": "fixed"}
    expected = asyncio.run(run(engine))
    with AsyncEngine(
        str(tiny_llama_dir), kv_cache_bytes=1 << 20, num_threads=1, speculative_config=config
    ) as fast:
        assert asyncio.run(run(fast)) == expected
        assert fast.engine.counters.num_accepted_draft_tokens > 0
        deadline = time.monotonic() + 5.0
        while not idle(fast) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert idle(fast)


def test_many_streams_at_once_do_not_disturb_each_other(engine: AsyncEngine) -> None:
    async def run() -> None:
        params = [SamplingParams(max_tokens=10, seed=i, ignore_eos=True) for i in range(12)]
        together = await asyncio.gather(
            *(collect(engine, f"p{i}", p) for i, p in enumerate(params))
        )
        for i, p in enumerate(params):
            alone = await collect(engine, f"p{i}", p)
            assert alone[-1].outputs == together[i][-1].outputs

    asyncio.run(run())


def test_leaving_a_stream_frees_its_pages_and_its_id(engine: AsyncEngine) -> None:
    async def run() -> None:
        params = long_params()
        for _ in range(3):
            stream = engine.generate("x", params, "reused")
            async for output in stream:
                if len(output.outputs[0].token_ids) > 3:
                    break
            await stream.aclose()
        assert await engine.abort("reused") is False

    asyncio.run(run())
    assert idle(engine)


def test_abort_ends_the_stream_with_what_there_is(engine: AsyncEngine) -> None:
    async def run() -> RequestOutput:
        last = None
        async for output in engine.generate("x", long_params(), "victim"):
            last = output
            if len(output.outputs[0].token_ids) >= 5 and not output.finished:
                assert await engine.abort("victim")
        assert last is not None
        return last

    last = asyncio.run(run())
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"
    assert 5 <= len(last.outputs[0].token_ids) < 400
    assert idle(engine)


def test_cancelling_a_task_aborts_its_request(engine: AsyncEngine) -> None:
    async def run() -> None:
        params = long_params()
        task = asyncio.create_task(collect(engine, "x", params, "cancelled"))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.abort("cancelled")

    asyncio.run(run())
    assert idle(engine)


def test_bad_requests_raise_and_others_go_on(engine: AsyncEngine) -> None:
    async def run() -> None:
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        good = asyncio.create_task(collect(engine, "x", params, "good"))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="empty"):
            await collect(engine, "")
        with pytest.raises(ValueError, match="allowed_token_ids"):
            await collect(engine, "x", SamplingParams(allowed_token_ids=[999]))
        async for _ in engine.generate("x", long_params(), "twin"):
            with pytest.raises(ValueError, match="in use"):
                await collect(engine, "y", params, "twin")
            break
        assert (await good)[-1].outputs[0].finish_reason == "length"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("sampling_params", "request_id"), [({"n": 2}, None), (5, None), (None, ["x"])]
)
def test_arguments_of_a_wrong_type_fail_for_their_caller_alone(
    engine: AsyncEngine, sampling_params: Any, request_id: Any
) -> None:
    """Catches a caller who hangs, and an engine that dies for everybody."""

    async def run() -> None:
        with pytest.raises(ValueError, match=r"sampling_params|request_id"):
            await asyncio.wait_for(collect(engine, "x", sampling_params, request_id), 5)
        assert (await collect(engine, "x", SamplingParams(max_tokens=2)))[-1].finished

    asyncio.run(run())


@pytest.mark.parametrize(
    "place",
    ["engine.engine.OutputText", "engine.engine.Sampler.admit", "engine.engine.Scheduler.add"],
)
def test_an_unforeseen_error_while_adding_reaches_its_caller_alone(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def explode(*args: object) -> None:
        raise MemoryError

    async def run() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(place, explode)
            with pytest.raises(MemoryError):
                await asyncio.wait_for(collect(engine, "x"), 5)
        assert (await collect(engine, "x", SamplingParams(max_tokens=2)))[-1].finished

    asyncio.run(run())
    assert idle(engine)


def test_a_loop_that_closes_while_it_waits_ends_nothing_but_itself(engine: AsyncEngine) -> None:
    async def run() -> None:
        await asyncio.wait_for(collect(engine, "x", long_params(n=8)), 0.01)

    for _ in range(3):
        with pytest.raises(asyncio.TimeoutError):
            asyncio.run(run())
    assert asyncio.run(collect(engine, "x", SamplingParams(max_tokens=2)))[-1].finished


def test_cancelling_while_it_is_being_added_leaks_nothing(engine: AsyncEngine) -> None:
    async def run() -> None:
        task = asyncio.create_task(collect(engine, "x", long_params(), "early"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await engine.abort("early") is False

    asyncio.run(run())
    assert idle(engine)


def test_a_dropped_engine_is_closed(tiny_llama_dir: Path) -> None:
    """Catches threads, and the weights they hold, that stay for ever."""
    engine = AsyncEngine(str(tiny_llama_dir), kv_cache_bytes=1 << 20, num_threads=1)
    thread = engine._driver._thread
    del engine
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_close_ends_streams_and_later_calls_raise(tiny_llama_dir: Path) -> None:
    engine = AsyncEngine(str(tiny_llama_dir), kv_cache_bytes=1 << 20, num_threads=1)

    async def run() -> None:
        stream = engine.generate("x", long_params())
        await anext(stream)
        await asyncio.to_thread(engine.close)
        last = [output async for output in stream][-1]
        assert last.outputs[0].finish_reason == "abort"
        with pytest.raises(RuntimeError, match="closed"):
            await collect(engine, "x")

    asyncio.run(run())
    engine.close()


def test_a_failing_step_reaches_every_stream(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches streams that wait for ever when the engine's thread has died."""
    engine = AsyncEngine(str(tiny_llama_dir), kv_cache_bytes=1 << 20, num_threads=1)

    def explode(*args: object) -> None:
        raise RuntimeError("hardware on fire")

    async def run() -> None:
        monkeypatch.setattr(engine.engine.runner, "forward", explode)
        results = await asyncio.gather(
            collect(engine, "x"), collect(engine, "y"), return_exceptions=True
        )
        assert all(isinstance(r, RuntimeError) for r in results)
        with pytest.raises(RuntimeError):
            await collect(engine, "z")

    asyncio.run(run())
    engine.close()
