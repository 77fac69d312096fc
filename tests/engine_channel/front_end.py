"""A front end that tests kill or stop: it prints the engine's process id, and how streams end.

python -m tests.engine_channel.front_end FOLDER [start]
"""

import asyncio
import sys

from rjax.api.async_engine import AsyncLLMEngine
from rjax.engine_channel.process_channel import ProcessChannel
from rjax.sampling import RequestOutputKind, SamplingParams

MAX_TOKENS = 8_000


async def read(engine: AsyncLLMEngine) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS, output_kind=RequestOutputKind.DELTA)
    tokens: list[int] = []
    async for output in engine.generate([1], params):
        if not tokens:
            print("streaming", flush=True)
        tokens += output.outputs[0].token_ids
    print("whole" if tokens == list(range(MAX_TOKENS)) else "not whole", flush=True)


async def serve(channel: ProcessChannel) -> None:
    engine = AsyncLLMEngine(channel)
    await engine.start()
    await asyncio.gather(*(read(engine) for _ in range(4)))
    await engine.stop()


def main() -> None:
    folder, start = sys.argv[1], sys.argv[2]
    arguments = {"folder": folder, "start": start, "step_seconds": 0.0005}
    channel = ProcessChannel("tests.engine_channel.stub_engine:make", arguments)
    print(channel.process.pid, flush=True)
    channel.wait_ready()
    asyncio.run(serve(channel))


if __name__ == "__main__":
    main()
