"""Sizes of the bundled model's engines: the same in all tests, so that they compile once."""

BUNDLED_SIZES = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "max_model_len": 2048,
    "num_pages": 64,
}
