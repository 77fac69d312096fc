"""What a program calls: `LLM`, `AsyncLLM`, their prompts, streams, scores and beams.

- `llm`, `llm_engine`: the offline classes, and `request_runner`, which steps their engine.
- `async_llm`, `async_engine`: the same on an event loop, and `request_queue` with its limits.
- `prompts`: the forms of a prompt; `prefixed_prompts`: prompts after a named prefix.
- `output_stream`, `scoring`, `beam_search`: the other calls. `progress`: the bar of a batch.
"""
