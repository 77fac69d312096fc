"""Channels between the event loop and the engine: a thread, or a process.

- `channel`: what both offer to `rjax.api.async_engine.AsyncLLMEngine`.
- `facts`: what a front end knows of its engine, as plain values.
- `engine_loop`: steps the engine and runs commands between the steps.
- `request_intake`: makes the token masks of a request beside the loop, and then adds it.
- `thread_channel`: the loop on a thread of this process.
- `process_channel`: the loop in a process of its own, which runs an `engine_server`.
- `messages`, `output_codec`, `value_codec`, `error_codec`: what the two processes say.
- `received_request`: makes texts and outputs of what an engine process sends.
- `message_sender`: sends without blocking the engine; merges outputs while the socket is full.

The engine process is `rjax.engine_channel.engine_process`.
"""
