"""A closed loop over an OpenAI-compatible server, and the reading of its event stream."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from interlock.bench.metrics import Trace
from interlock.bench.spec import Load, Target
from interlock.errors import InterlockError

if TYPE_CHECKING:
    import httpx

DELTA_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 600.0


class StreamReader:
    """Turns the events of one stream into token arrivals.

    Servers that report usage with every chunk tell exactly how many tokens each brought. For the
    others the final count is spread evenly over the chunks that carried a delta of any kind, and
    the trace is marked as estimated unless that comes out as one token per chunk.
    """

    def __init__(self, start: float, prompt_tokens: int) -> None:
        self.trace = Trace(start, [], start, prompt_tokens)
        self._counted: list[tuple[float, float]] = []
        self._deltas: list[float] = []
        self._total = 0
        self._reports = 0

    def feed(self, line: str, now: float) -> None:
        """Take one line of the stream that arrived at ``now``."""
        if not line.startswith("data:") or line[5:].strip() == "[DONE]":
            return
        event = json.loads(line[5:])
        if "error" in event:
            self.trace.error = str((event["error"] or {}).get("message", event["error"]))
            return
        if any(_has_delta(choice) for choice in event.get("choices") or []):
            self._deltas.append(now)
        self._count(event.get("usage") or {}, bool(event.get("choices")), now)

    def _count(self, usage: dict[str, Any], has_choices: bool, now: float) -> None:
        if "prompt_tokens" in usage:
            self.trace.prompt_tokens = usage["prompt_tokens"]
        if usage.get("completion_tokens") is None:
            return
        fresh = usage["completion_tokens"] - self._total
        self._total = usage["completion_tokens"]
        self._reports += has_choices
        if fresh > 0:
            self._counted.append((now, float(fresh)))

    def finish(self, now: float) -> Trace:
        """The trace; its end is the last token's arrival, or ``now`` if there was none."""
        trace = self.trace
        if self._reports and self._reports >= len(self._deltas):
            trace.arrivals = self._counted
        elif self._deltas:
            each = (self._total or len(self._deltas)) / len(self._deltas)
            trace.arrivals = [(at, each) for at in self._deltas]
            trace.estimated = each != 1.0 or not self._total
        trace.end = trace.arrivals[-1][0] if trace.arrivals else now
        if not trace.arrivals and trace.error is None:
            trace.error = "the server sent no token"
        return trace


def _has_delta(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text")) or any(delta.get(field) for field in DELTA_FIELDS)


class UrlSession:
    """Measures a running server; same interface as `session.EngineSession`."""

    def __init__(self, target: Target, clock: Callable[[], float] = time.monotonic) -> None:
        import httpx

        self._clock = clock
        self._url = target.url
        self._headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        self._http = httpx
        self._model = target.model or self._first_model()

    def info(self) -> dict[str, Any]:
        return {"url": self._url, "model_name": self._model, "plugins": self._plugins()}

    def pids(self) -> list[int]:
        """Processes of the server if it runs on this machine, so that their CPU is not 'other'."""
        from interlock.bench.machine import listening_pids

        url = self._http.URL(self._url)
        local = url.host in ("127.0.0.1", "localhost", "::1")
        return listening_pids(url.port or 80) if local else []

    def resident_bytes(self) -> int:
        """Unknown: the server may be on another machine."""
        return 0

    def counters(self) -> dict[str, dict[str, float]]:
        return {plugin["name"]: plugin.get("counters", {}) for plugin in self._plugins()}

    def _plugins(self) -> list[dict[str, Any]]:
        """The server's plugins if it is one of ours; other servers have no such route."""
        try:
            answer = self._get("/plugins")
        except (self._http.HTTPError, ValueError):
            return []
        return answer.get("plugins", []) if isinstance(answer, dict) else []

    def totals(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing of ours runs between two measurements."""

    def run(self, load: Load, prompts: Sequence[Sequence[int]]) -> list[Trace]:
        return asyncio.run(self._run(load, prompts))

    def _get(self, path: str) -> Any:
        address = self._url + path
        answer = self._http.get(address, headers=self._headers, timeout=CONNECT_TIMEOUT_S)
        return answer.raise_for_status().json()

    def _first_model(self) -> str:
        try:
            return str(self._get("/v1/models")["data"][0]["id"])
        except (self._http.HTTPError, ValueError, LookupError, TypeError) as error:
            raise InterlockError(f"{self._url}: cannot list its models: {error}") from None

    async def _run(self, load: Load, prompts: Sequence[Sequence[int]]) -> list[Trace]:
        limits = self._http.Limits(max_connections=load.concurrency)
        timeout = self._http.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        traces: list[Trace | None] = [None] * len(prompts)
        waiting = iter(enumerate(prompts))
        async with self._http.AsyncClient(limits=limits, timeout=timeout) as client:
            workers = [self._worker(client, load, waiting, traces) for _ in range(load.concurrency)]
            await asyncio.gather(*workers)
        return [trace for trace in traces if trace is not None]

    async def _worker(
        self,
        client: httpx.AsyncClient,
        load: Load,
        waiting: Iterator[tuple[int, Sequence[int]]],
        traces: list[Trace | None],
    ) -> None:
        for index, prompt in waiting:
            traces[index] = await self._request(client, load, prompt)

    async def _request(self, client: httpx.AsyncClient, load: Load, prompt: Sequence[int]) -> Trace:
        reader = StreamReader(self._clock(), len(prompt))
        try:
            async for line in self._lines(client, self._body(load, prompt)):
                reader.feed(line, self._clock())
        except (self._http.HTTPError, ValueError, InterlockError) as error:
            reader.trace.error = f"{type(error).__name__}: {error}"
        return reader.finish(self._clock())

    def _body(self, load: Load, prompt: Sequence[int]) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": load.output_tokens,
            "temperature": load.temperature,
            "ignore_eos": load.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }

    async def _lines(self, client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[str]:
        url = f"{self._url}/v1/completions"
        async with client.stream("POST", url, json=body, headers=self._headers) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode("utf-8", "replace")
                raise InterlockError(f"HTTP {answer.status_code}: {text[:300]}")
            async for line in answer.aiter_lines():
                yield line
