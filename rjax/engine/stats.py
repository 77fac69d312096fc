"""What an engine has done so far."""

import dataclasses


@dataclasses.dataclass(slots=True)
class EngineStats:
    """Counters since the engine started; tokens, steps and bytes.

    Attributes:
        backend: attention backend in use.
        device: what it runs on.
        steps: steps dispatched.
        prompt_tokens: of all sequences admitted.
        cached_tokens: of those, taken from the prefix cache.
        output_tokens: read back.
        preemptions: times a sequence gave up its pages.
        kv_tokens_read: tokens of KV that attention read (each layer reads so many).
        kv_tokens_unshared: the same if every sequence had read its own.
        shared_groups: groups of sequences that read a run of pages together, over all steps.
        num_running, num_waiting: sequences now.
        kv_bytes_used: pages in use now.
        kv_bytes_total: the whole pool.
        page_bytes: one page.
        kv_bytes_without_sharing: what the running sequences would take if each had its own pages.
        peak_kv_bytes, peak_kv_bytes_unshared: the two at the moment of most use.
    """

    backend: str
    device: str
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    kv_tokens_read: int = 0
    kv_tokens_unshared: int = 0
    shared_groups: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_bytes_used: int = 0
    kv_bytes_total: int = 0
    page_bytes: int = 0
    kv_bytes_without_sharing: int = 0
    peak_kv_bytes: int = 0
    peak_kv_bytes_unshared: int = 0
