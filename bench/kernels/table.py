"""The cases of the kernel table, with the times to reach on an H200."""

import numpy as np

from bench.kernels.cases import Case


def table_cases() -> list[Case]:
    lengths = np.random.default_rng(0).integers(16, 16385, 64)
    decode = [
        Case("decode 64 x 2048", 64, 0, 2048, share="off", split=2048, target_us=132),
        Case("decode 16 x 8192", 16, 0, 8192, share="off", split=2048, target_us=130),
        Case("decode 256 x 512", 256, 0, 512, share="off", split=512, target_us=147),
        Case("decode 8 x 2048", 8, 0, 2048, share="off", split=256, target_us=20.8),
        Case("decode 64 x 128", 64, 0, 128, share="off", split=128, target_us=20.9),
        Case(
            "decode 64 x 16..16384",
            64,
            0,
            tuple(int(x) for x in lengths),
            share="off",
            split=1024,
        ),
    ]
    prefix = [
        Case("prefix 256 rows, 2048", 64, 2048, 1, split=256, tile_rows=32, target_us=12),
        Case("prefix 256 rows, 8192", 64, 8192, 1, split=1024, tile_rows=32, target_us=22),
        Case("prefix 256 rows, 32768", 64, 32768, 1, split=4096, tile_rows=32, target_us=62),
        Case("prefix 1024 rows, 32768", 256, 32768, 1, split=8192, tile_rows=32, target_us=250),
    ]
    relay = [
        Case("relay 64; 2048; 256", 64, 2048, 256, split=256, tile_rows=32, target_us=29),
        Case("relay 64; 8192; 256", 64, 8192, 256, split=1024, tile_rows=32, target_us=37),
        Case("relay 256; 2048; 256", 256, 2048, 256, split=512, tile_rows=32, target_us=91),
        Case("relay 64; 32768; 128", 64, 32768, 128, split=4096, tile_rows=32, target_us=64),
        Case("relay 8 x 8; 2048; 256", 64, 2048, 256, prefixes=8, tile_rows=8, split=512),
        Case("one 2048; 128", 1, 2048, 128, split=128, target_us=10),
        Case("one 2048; 128 unshared", 1, 2048, 128, share="off", split=128, target_us=10),
    ]
    prefill = [
        Case("prefill 8192", 1, 0, 8192, queries=8192, split=8192, tile_rows=32, target_us=994),
    ]
    groups = [
        Case(
            f"decode 64 x 2048, G {32 // k}",
            64,
            0,
            2048,
            K=k,
            share="off",
            split=2048,
            tile_rows=2 * k,
        )
        for k in (32, 4, 2)
    ]
    pages = [
        Case(f"decode 64 x 2048, S {s}", 64, 0, 2048, S=s, share="off", split=2048)
        for s in (16, 32, 128)
    ]
    dims = [Case("decode 64 x 2048, H 64", 64, 0, 2048, H=64, share="off", split=2048)]
    return [*decode, *prefix, *relay, *prefill, *groups, *pages, *dims]
