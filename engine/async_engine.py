"""The streaming API: an engine in a thread of its own, ``async for`` over partial outputs, abort.

Owns the thread that drives the engine and the queues to and from it; all engine work happens in that one thread.
Knows nothing of HTTP. Invariant: every stream ends, with a finished output, or with the exception that ended the
engine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from engine.assembly import build_engine
from engine.config import EngineConfig
from engine.outputs import RequestOutput
from engine.prompts import Prompt, PromptReader
from engine.request_group import RequestGroup
from engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class _Stream:
    """Where one request's outputs go: the latest one, since each holds all that came before.

    A reader that falls behind skips outputs and loses nothing; memory stays bounded.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._latest: RequestOutput | BaseException | None = None

    def put(self, item: RequestOutput | BaseException) -> None:
        """From the engine's thread. A loop that has closed no longer listens."""
        try:
            self._loop.call_soon_threadsafe(self._set, item)
        except RuntimeError:
            logger.debug("the event loop of a stream is closed; its output is dropped")

    def _set(self, item: RequestOutput | BaseException) -> None:
        self._latest = item
        self._ready.set()

    async def get(self) -> RequestOutput:
        await self._ready.wait()
        self._ready.clear()
        assert self._latest is not None
        if isinstance(self._latest, BaseException):
            raise self._latest
        return self._latest


class AsyncEngine:
    """An engine that many tasks use at once. Arguments are those of ``LLM``.

    Raises:
        ValueError: as ``LLM``.
    """

    def __init__(self, model: str, **kwargs: Any) -> None:
        speculative_config = kwargs.pop("speculative_config", None)
        if speculative_config is not None:
            raise ValueError(
                f"speculative_config must be None, got {speculative_config!r}: this version does not speculate yet"
            )
        self.config, self.engine = build_engine(EngineConfig.from_kwargs(model=model, **kwargs))
        self._reader = PromptReader(
            self.engine.tokenizer,
            vocab_size=self.config.model.vocab_size,
            max_model_len=self.config.max_model_len,
        )
        self._streams: dict[str, tuple[RequestGroup, _Stream]] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._error: BaseException | None = None
        self._names = itertools.count()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)
        self._thread.start()

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
        """
        tokens = self._reader.read(prompt)
        params = sampling_params or SamplingParams()
        name = request_id if request_id is not None else f"async-{next(self._names)}"
        stream = _Stream()

        def add() -> None:
            if name in self._streams:
                raise ValueError(f"request_id {name!r} is in use; choose another")
            self._streams[name] = (self.engine.add(name, tokens, params), stream)

        await self._call(add)
        finished = False
        try:
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._post(lambda: self._abort(name, stream))

    async def abort(self, request_id: str) -> bool:
        """End a request now; its stream yields what there is, with finish_reason "abort". False if unknown."""
        return await self._call(lambda: self._abort(request_id, None))

    def close(self) -> None:
        """Abort what runs, stop the thread. May be called twice."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def __enter__(self) -> AsyncEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _abort(self, name: str, stream: _Stream | None) -> bool:
        """In the engine's thread. With ``stream``: only if the id still means that very request."""
        found = self._streams.get(name)
        if found is None or (stream is not None and found[1] is not stream):
            return False
        del self._streams[name]
        self.engine.abort(found[0])
        found[1].put(found[0].output())
        return True

    async def _call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the engine's thread, between two steps, and give back what it gives."""
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
            result, failure = None, self._error
            if failure is None:
                try:
                    result = function()
                except ValueError as error:
                    failure = error
            loop.call_soon_threadsafe(settle, result, failure)

        self._post(run)
        return await future

    def _post(self, command: Callable[[], Any]) -> None:
        with self._wake:
            if self._error is not None or self._closing:
                raise RuntimeError("the engine is closed") from self._error
            self._commands.append(command)
            self._wake.notify()

    def _main(self) -> None:
        try:
            while self._wait_for_work():
                while self._commands:
                    self._commands.popleft()()
                if self.engine.has_unfinished:
                    self._publish(self.engine.step())
        except BaseException as error:
            logger.exception("the engine stopped")
            self._stop(error)
        else:
            self._stop(None)

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._closing or self._commands or self.engine.has_unfinished):
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
            self._error = error or RuntimeError("the engine is closed")
        for name, (group, stream) in list(self._streams.items()):
            if error is None:
                self._abort(name, stream)
            else:
                self.engine.abort(group, "error")
                stream.put(error)
        self._streams.clear()
        while self._commands:
            self._commands.popleft()()
