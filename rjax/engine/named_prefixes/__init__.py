"""Named prefixes: kept under a name with their KV, and put in front of prompts.

- `named_prefix`: what a named prefix is.
- `protocol`: what an engine offers to `LLM`, `AsyncLLM` and the server.
- `named_prefixes`: the engine's part, made of the three that follow.
- `pinned_prefixes`: prefixes whose KV is in the pool, with a reference on each page.
- `pending_prefixes`: prefixes that running requests compute.
- `prefix_file`: tokens and KV of a prefix in a safetensors file.

The layer above, which knows texts, is `rjax.prefixed_prompts`.
"""
