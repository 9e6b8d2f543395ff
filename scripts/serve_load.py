"""How fast `rlhf serve` is: clients that stream at once, against one client and against the sampler's own batch.

    python scripts/serve_load.py --url http://127.0.0.1:8000 --model demo/ppo --run runs/demo --clients 32 --requests 256

Prints tokens per second of each, the time to the first token at the 95th percentile, and the server's memory if --pid is given.
Only addresses of this machine are accepted.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path
from statistics import quantiles
from urllib.parse import urlparse

import httpx

PROMPTS = [
    f"Give me {n} {what} ."
    for n in ("one", "two", "three", "four")
    for what in ("colours", "animals", "names", "cities")
]


async def ask(client: httpx.AsyncClient, model: str, seed: int, length: int) -> tuple[int, float]:
    """Tokens of one streamed response, and the seconds to its first."""
    body = {"model": model, "messages": [{"role": "user", "content": PROMPTS[seed % len(PROMPTS)]}], "seed": seed, "max_tokens": length,
            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    start, first, tokens = time.perf_counter(), 0.0, 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - start
                tokens = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", tokens)
    return tokens, first


async def load(url: str, model: str, clients: int, requests: int, length: int) -> tuple[float, float]:
    """Tokens per second of all clients together, and the 95th percentile of the time to the first token."""
    seeds = iter(range(requests))
    answers: list[tuple[int, float]] = []

    async def work(client: httpx.AsyncClient) -> None:
        for seed in seeds:
            answers.append(await ask(client, model, seed, length))

    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        start = time.perf_counter()
        await asyncio.gather(*(work(client) for _ in range(clients)))
        seconds = time.perf_counter() - start
    firsts = [first for _, first in answers]
    return sum(tokens for tokens, _ in answers) / seconds, quantiles(firsts, n=20)[-1] if len(firsts) > 1 else firsts[0]


def sampler(run: str, stage: str, batch: int, requests: int, length: int) -> float:
    """Tokens per second of the sampler on the same prompts."""
    import rlhf
    from rlhf.chat_template import encode_prompts, end_ids
    from rlhf.model.generate import sample

    loaded = rlhf.load(run, "cpu")
    tokenizer, policy = loaded.tokenizer, loaded.policy(stage)
    prompts = encode_prompts(tokenizer, [PROMPTS[seed % len(PROMPTS)] for seed in range(requests)])
    settings = {"max_new_tokens": length, "eos_token_id": end_ids(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    sample(policy, prompts[:batch], batch_size=batch, settled=True, **settings)
    start = time.perf_counter()
    drawn = sample(policy, prompts, batch_size=batch, settled=True, **settings)
    return sum(map(len, drawn.responses)) / (time.perf_counter() - start)


def resident(pid: int) -> float:
    """Megabytes of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--pid", type=int)
    given = parser.parse_args()
    if urlparse(given.url).hostname not in ("127.0.0.1", "localhost", "::1"):
        parser.error("--url: want an address of this machine")
    before = resident(given.pid) if given.pid else 0.0
    asyncio.run(load(given.url, given.model, given.clients, given.clients, given.length))
    alone, _ = asyncio.run(load(given.url, given.model, 1, max(2, given.requests // 16), given.length))
    whole, first = asyncio.run(load(given.url, given.model, given.clients, given.requests, given.length))
    own = sampler(given.run, given.model.rpartition("/")[2], given.clients, given.requests, given.length)
    print(f"one client: {alone:,.0f} tokens/s; {given.clients} clients: {whole:,.0f} ({whole / alone:.1f} times)")
    print(f"sampler, batch of {given.clients}: {own:,.0f} tokens/s; the server reaches {whole / own:.2f} of it")
    print(f"time to the first token, 95th percentile: {1000 * first:.0f} ms")
    if given.pid:
        print(f"memory: {before:.0f} MB before, {resident(given.pid):.0f} MB after {given.requests} requests")


if __name__ == "__main__":
    main()
