"""Throughput of `rlhf serve`: many streaming clients, compared with one client and with the sampler in batches of the same size.

    python scripts/serve_load.py --url http://127.0.0.1:8000 --model demo/ppo --run runs/demo --pid $(pgrep -f "rlhf serve")

Rounds of the server and of the sampler alternate, so that other load on the machine affects both; medians are printed. The
sampler runs in this process with OMP_NUM_THREADS threads: give the server the same number with threads=N. With --pid it also prints
tokens per second of processor time, which other load hardly changes, and the server's memory. Accepts only addresses of this
machine. The server must allow the rate: serve.requests_per_minute=1000000.
"""

import argparse
import asyncio
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlparse

WHAT = ("colours", "animals", "names", "cities")
PROMPTS = [f"Give me {n} {what} ." for n in ("one", "two", "three", "four") for what in WHAT]
USAGE = re.compile(rb'"completion_tokens":(\d+)')
LAST_CHUNK = b"0\r\n\r\n"  # of a chunked body


@dataclass
class Round:
    """The figures of one round of requests."""

    tokens: int = 0
    seconds: float = 0.0
    processor: float = 0.0  # processor seconds of the server or sampler
    firsts: list[float] = field(default_factory=list)  # seconds to the first event, per request

    def rate(self) -> float:
        return self.tokens / self.seconds


class Client(asyncio.Protocol):
    """One connection that sends its requests in turn; it parses as little as possible, since it shares the processors."""

    def __init__(self, bodies: list[bytes], result: Round):
        self.bodies, self.result = bodies, result
        self.start, self.parts = 0.0, list[bytes]()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.ask()

    def ask(self) -> None:
        if not self.bodies:
            self.transport.close()
            self.done.set_result(None)
            return
        self.start, self.parts = time.perf_counter(), []
        self.transport.write(self.bodies.pop())  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if not self.parts or (len(self.parts) == 1 and b"data: " not in self.parts[0]):
            if not self.parts and not data.startswith(b"HTTP/1.1 200"):
                self.done.set_exception(ValueError(data[:300].decode("latin-1")))
                return
            if b"data: " in data:
                self.result.firsts.append(time.perf_counter() - self.start)
        self.parts.append(data)
        if data.endswith(LAST_CHUNK):
            whole = b"".join(self.parts)
            assert b"data: [DONE]" in whole, whole[-300:]
            self.result.tokens += int(USAGE.findall(whole)[-1])
            self.ask()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed the connection"))


def request(model: str, seed: int, length: int, host: str) -> bytes:
    """The bytes of a streaming chat request."""
    asked = {"model": model, "messages": [{"role": "user", "content": PROMPTS[seed % len(PROMPTS)]}], "seed": seed}
    asked |= {"max_tokens": length, "stream": True, "stream_options": {"include_usage": True}}
    body = json.dumps(asked)
    head = f"host: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return f"POST /v1/chat/completions HTTP/1.1\r\n{head}{body}".encode()


async def load(url: str, model: str, clients: int, requests: int, length: int, pids: list[int]) -> Round:
    """Send the requests over `clients` connections."""
    place, result = urlparse(url), Round()
    assert place.hostname is not None
    bodies = [request(model, seed, length, str(place.netloc)) for seed in range(requests)]
    before, start = processor_seconds(pids), time.perf_counter()
    connect, to = asyncio.get_running_loop().create_connection, (place.hostname, place.port or 80)
    made = [await connect(lambda: Client(bodies, result), *to) for _ in range(clients)]
    await asyncio.gather(*(client.done for _, client in made))
    result.seconds, result.processor = time.perf_counter() - start, processor_seconds(pids) - before
    return result


def make_sampler(run: str, stage: str, batch: int, requests: int, length: int) -> Callable[[], Round]:
    """Rounds of the sampler on the same prompts, in batches of the same size."""
    import rlhf
    from rlhf.data.chat_template import encode_prompts, end_ids
    from rlhf.engines.sampling import sample

    loaded = rlhf.load(run, "cpu")
    policy, tokenizer = loaded.policy(stage), loaded.tokenizer
    prompts = encode_prompts(tokenizer, [PROMPTS[seed % len(PROMPTS)] for seed in range(requests)])
    how: Any = {"max_new_tokens": length, "eos_token_id": end_ids(tokenizer), "pad_token_id": tokenizer.pad_token_id}

    def draw() -> Round:
        start, before = time.perf_counter(), time.process_time()
        drawn = sample(policy, prompts, batch_size=batch, **how)
        return Round(sum(map(len, drawn.responses)), time.perf_counter() - start, time.process_time() - before)

    return draw


def processor_seconds(pids: list[int]) -> float:
    """User and system time of processes."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def resident(pids: list[int]) -> float:
    """Resident memory of processes in MiB."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=256, help="per round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--pid", type=int)
    given = parser.parse_args()
    if urlparse(given.url).hostname not in ("127.0.0.1", "localhost", "::1"):
        parser.error("--url: want an address of this machine")

    pids = [given.pid] if given.pid else []

    def served(clients: int, requests: int) -> Round:
        return asyncio.run(load(given.url, given.model, clients, requests, given.length, pids))

    sampler = make_sampler(given.run, given.model.rpartition("/")[2], given.clients, given.requests, given.length)
    served(given.clients, given.requests), sampler()  # the first of either is slower
    alone, together, drawn = [], [], []
    for number in range(given.rounds):
        alone.append(served(1, max(4, given.requests // 16)))
        together.append(served(given.clients, given.requests))
        drawn.append(sampler())
        if pids:
            print(f"round {number + 1}: {resident(pids):.0f} MB")
    one, many, batch = (median(map(Round.rate, rounds)) for rounds in (alone, together, drawn))
    ratios = sorted(a.rate() / b.rate() for a, b in zip(together, drawn, strict=True))
    firsts = sorted(1000 * first for one in together for first in one.firsts)
    print(f"one client: {one:,.0f} tokens/s; {given.clients} clients: {many:,.0f} ({many / one:.1f} times)")
    print(f"sampler, batch of {given.clients}: {batch:,.0f} tokens/s")
    print(f"the server reaches {median(ratios):.2f} [{ratios[0]:.2f}, {ratios[-1]:.2f}] of the sampler")
    if pids:
        a, b = (median(one.tokens / one.processor for one in rounds) for rounds in (together, drawn))
        print(f"tokens per second of processor time: server {a:,.0f}, sampler {b:,.0f} ({a / b:.2f})")
    print(f"to the first token: median {median(firsts):.0f} ms, 95th percentile {quantiles(firsts, n=20)[-1]:.0f} ms")
    print(f"tokens per response: {together[0].tokens / given.requests:.1f}; machine load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
