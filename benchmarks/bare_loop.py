"""The floor: encode, post, read — two requests per sample with aiohttp, and nothing else (no limits, no retries)."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time

import aiohttp
import orjson


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def burst(session: aiohttp.ClientSession, base: str, count: int) -> None:
    gate = asyncio.Semaphore(400)
    prompt = orjson.Fragment(orjson.dumps({"chunks": [{"type": "encoded_text", "tokens": list(range(1000))}]}))
    sent = {"content-type": "application/json", "x-api-key": "tml-stub"}
    wanted = {**sent, "accept": "application/x-protobuf"}

    async def one(seq_id: int) -> None:
        async with gate:
            body = orjson.dumps({
                "num_samples": 1, "prompt": prompt, "sampling_params": {"max_tokens": 100}, "seq_id": seq_id,
                "sampling_session_id": "s:sample:0", "prompt_logprobs": False, "topk_prompt_logprobs": 0,
            })  # fmt: skip
            async with session.post(f"{base}/asample", data=body, headers=sent) as answer:
                request_id = orjson.loads(await answer.read())["request_id"]
            ask = orjson.dumps({"request_id": request_id})
            async with session.post(f"{base}/retrieve_future", data=ask, headers=wanted) as found:
                assert found.status == 200 and await found.read()

    await asyncio.gather(*(one(seq_id) for seq_id in range(count)))


async def main(port: str, count: int) -> None:
    base = f"http://127.0.0.1:{port}/api/v1"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=400)) as session:
        await burst(session, base, 100)
        started, used = time.perf_counter(), cpu()
        await burst(session, base, count)
    print(json.dumps({
        "sample_cpu_ms_each": round((cpu() - used) / count * 1000, 3),
        "sample_wall_s": round(time.perf_counter() - started, 3),
    }))  # fmt: skip


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
