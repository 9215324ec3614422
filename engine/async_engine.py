"""The streaming API: an engine in a thread of its own, ``async for`` over partial outputs, abort.

Owns the thread that drives the engine and the queues to and from it; all engine work happens in that one thread.
Knows nothing of HTTP. Invariants: every stream ends, with a finished output or with the exception that ended the
engine; whatever one caller passes can fail for that caller alone, which is why commands catch every Exception and
hand it to who sent them: only a failing step ends the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from engine.assembly import build_engine
from engine.engine import Engine
from engine.feature_tap import FeatureTap
from engine.outputs import RequestOutput
from engine.prompts import Prompt, TokenPrompt
from engine.request_group import RequestGroup
from engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class AsyncEngine:
    """An engine that many tasks use at once. Arguments are those of ``LLM``.

    Close it, or use it in a ``with``; one that is dropped is closed when it is collected or when Python ends.

    Raises:
        ValueError: as ``LLM``.
    """

    def __init__(self, model: str, **kwargs: Any) -> None:
        self.config, self.engine, self._reader = build_engine(model=model, **kwargs)
        self._driver = _Driver(self.engine)
        self._names = itertools.count()
        self._finalizer = weakref.finalize(self, self._driver.close)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream a request: each output holds all that there is so far; the last is ``finished``.

        Leaving the loop early, or cancelling the task, aborts the request.

        Raises:
            ValueError: bad prompt or parameters, or the id is in use.
            RuntimeError: the engine is closed, or a step failed.
        """
        tokens = self._reader.read(prompt)
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, got {params!r}")
        name = f"async-{next(self._names)}" if request_id is None else request_id
        if not isinstance(name, str):
            raise ValueError(f"request_id must be a string, got {request_id!r}")
        stream = _Stream()
        finished = False
        try:
            await self._driver.call(lambda: self._driver.add(name, tokens, params, stream))
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._driver.post(lambda: self._driver.abort(name, stream))

    async def abort(self, request_id: str) -> bool:
        """End a request now; its stream yields what there is, with finish_reason "abort". False if unknown."""
        return await self._driver.call(lambda: self._driver.abort(request_id, None))

    async def attach_tap(self, tap: FeatureTap) -> None:
        """As ``LLM.attach_tap``, between two steps: also of requests that run."""
        await self._driver.call(lambda: self.engine.attach_tap(tap))

    async def detach_tap(self) -> FeatureTap | None:
        """As ``LLM.detach_tap``, between two steps; the reader is told that requests that run end there."""
        return await self._driver.call(self.engine.detach_tap)

    def close(self) -> None:
        """Abort what runs, stop the thread. May be called twice."""
        self._finalizer()

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Stream:
    """Where one request's outputs go: the latest one, since each holds all that came before.

    A reader that falls behind skips outputs and loses nothing; memory stays bounded.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._latest: RequestOutput | BaseException | None = None

    def put(self, item: RequestOutput | BaseException) -> None:
        """From the engine's thread."""
        _call_in(self._loop, self._set, item)

    def _set(self, item: RequestOutput | BaseException) -> None:
        self._latest = item
        self._ready.set()

    async def get(self) -> RequestOutput:
        await self._ready.wait()
        self._ready.clear()
        assert self._latest is not None
        if isinstance(self._latest, BaseException):
            raise RuntimeError(f"the engine stopped: {self._latest!r}") from self._latest
        return self._latest


class _Driver:
    """The thread that owns the engine. It holds no reference to the ``AsyncEngine``, so that can be collected."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._streams: dict[str, tuple[RequestGroup, _Stream]] = {}
        self._commands: deque[Callable[[], Any]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

    # ---- from any thread

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the engine's thread, between two steps, and give back what it gives or raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def run() -> None:
            result, failure = None, self._closed_error()
            if failure is None:
                try:
                    result = function()
                except Exception as error:  # see the header: it is the caller's
                    failure = error
            _call_in(loop, settle, result, failure)

        if not self.post(run):
            raise self._closed_error() or RuntimeError("the engine is closed")
        return await future

    def post(self, command: Callable[[], Any]) -> bool:
        """Queue a command for the engine's thread; False if that has ended."""
        with self._wake:
            if self._error is not None or self._closing:
                return False
            self._commands.append(command)
            self._wake.notify()
            return True

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _closed_error(self) -> RuntimeError | None:
        if self._error is None:
            return None
        error = RuntimeError("the engine is closed")
        error.__cause__ = self._error
        return error

    # ---- in the engine's thread

    def add(self, name: str, tokens: TokenPrompt, params: SamplingParams, stream: _Stream) -> None:
        if name in self._streams:
            raise ValueError(f"request_id {name!r} is in use; choose another")
        self._streams[name] = (self._engine.add(name, tokens, params), stream)

    def abort(self, name: str, stream: _Stream | None) -> bool:
        """With ``stream``: only if the id still means that very request."""
        found = self._streams.get(name)
        if found is None or (stream is not None and found[1] is not stream):
            return False
        del self._streams[name]
        self._engine.abort(found[0])
        found[1].put(found[0].output())
        return True

    def _main(self) -> None:
        try:
            while self._wait_for_work():
                while self._commands:
                    self._commands.popleft()()
                if self._engine.has_unfinished:
                    self._publish(self._engine.step())
        except BaseException as error:
            logger.exception("the engine stopped")
            self._stop(error)
        else:
            self._stop(None)

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._closing or self._commands or self._engine.has_unfinished):
                self._wake.wait()
            return not self._closing

    def _publish(self, groups: list[RequestGroup]) -> None:
        for group in groups:
            found = self._streams.get(group.request_id)
            if found is None:
                continue
            if group.finished:
                del self._streams[group.request_id]
            found[1].put(group.output())

    def _stop(self, error: BaseException | None) -> None:
        """Nobody is left waiting: streams get the error or an aborted output, commands an error."""
        with self._wake:
            self._error = error or RuntimeError("close() was called")
        for name, (_, stream) in list(self._streams.items()):
            if error is None:
                self.abort(name, stream)
            else:
                stream.put(error)
        self._streams.clear()
        self._engine.recover()
        while self._commands:
            self._commands.popleft()()


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    """Call in an event loop's thread; a loop that has closed has nobody who waits."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        logger.debug("the event loop of a caller is closed; its result is dropped")
