"""A server with known delays, for what measures servers: the first token after one time, the others after
another.

    with TimedServer(first_s=0.05, next_s=0.01) as server:
        run(… base_url=server.url)

It runs on a thread with a loop of its own and keeps every body that it was sent. Delays are counted from
when a request came, so that they do not add up.
"""

import asyncio
import json
import threading
import time

from aiohttp import web


class TimedServer:
    """An OpenAI server that says "a " again and again."""

    def __init__(self, first_s=0.0, next_s=0.0, *, metrics=(), status=200, broken=False, tokens_per_chunk=1):
        self.first_s, self.next_s, self.status = first_s, next_s, status
        self.broken, self.tokens_per_chunk = broken, tokens_per_chunk
        self.metrics = list(metrics)
        """Pages of /metrics, one after the other; the last stays."""
        self.bodies, self.times, self.headers = [], [], []
        self.sent = []
        """Of each stream the times at which its chunks went out."""
        self.running = self.most_running = 0

    def __enter__(self):
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)

    def _run(self, ready):
        asyncio.run(self._serve(ready))

    async def _serve(self, ready):
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        for path in ("completions", "chat/completions", "embeddings", "rerank"):
            app.router.add_post(f"/v1/{path}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        ready.set()
        await self._end.wait()
        await runner.cleanup()

    async def _models(self, request):
        return web.json_response({"data": [{"id": "fake", "root": "fake-root"}]})

    async def _metrics(self, request):
        page = self.metrics.pop(0) if len(self.metrics) > 1 else (self.metrics or [""])[0]
        return web.Response(text=page, status=200 if page else 404)

    async def _answer(self, request):
        came = time.perf_counter()
        body = await request.json()
        self.bodies.append(body)
        self.times.append(came)
        self.headers.append(request.headers)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            if self.status != 200:
                return web.json_response({"error": {"message": "no room here"}}, status=self.status)
            if request.path.endswith("completions"):
                return await self._stream(request, body, came)
            await asyncio.sleep(self.first_s)
            return web.json_response({"usage": {"prompt_tokens": 7, "total_tokens": 7}})
        finally:
            self.running -= 1

    async def _stream(self, request, body, came):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = body.get("max_tokens") or body.get("max_completion_tokens")
        sent, key = [], "delta" if "chat" in request.path else "text"
        self.sent.append((came, sent))
        for place in range(0, count, self.tokens_per_chunk):
            due = came + self.first_s + place // self.tokens_per_chunk * self.next_s
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if self.broken and place:
                await response.write(b'data: {"error": {"message": "the engine died"}}\n\n')
                return response
            choice = {"index": 0, key: {"content": "a "} if key == "delta" else "a "}
            sent.append(time.perf_counter())
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        usage = {"prompt_tokens": 5, "completion_tokens": count}
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b": a comment\n\ndata: [DONE]\n\n")
        return response
