"""The cases of the kernel table, with targets on an H200."""

import dataclasses
import itertools

import numpy as np

from bench.kernels.cases.attention import Case, Target

_PEERS = (  # most interesting first: a run may run out of time
    "relay 64; 2048; 256",
    "decode 64 x 2048",
    "relay 64; 32768; 128",
    "prefill 8192",
    "relay 256; 2048; 256",
    "relay 64; 8192; 256",
    "prefix 256 rows, 8192",
    "one 2048; 128",
    "decode 8 x 2048",
    "decode 256 x 512",
    "relay 8 x 8; 2048; 256",
    "decode 16 x 8192",
    "decode 64 x 16..16384",
)
_RELAY = Target(us=5, factor=1.35)  # of the whole operation, including relay fusion


def table_cases() -> list[Case]:
    """All cases, each after the case that its target refers to."""
    cases = (_decode(), _prefix(), _relay(), _prefill(), _fp8(), _shapes(), _split_heads())
    return [*itertools.chain(*cases), *_options()]


def small_cases() -> list[Case]:
    """A few cases of the same kinds, for a CPU."""
    plain = Case(
        "decode 3 x 70", 3, 0, 70, N=4, K=2, H=16, S=16, tile_rows=4, split=32, share="off"
    )
    relay = dataclasses.replace(
        plain, name="relay 4; 64; 20", batch=4, shared=64, own=20, share="on", target=_RELAY
    )
    several = dict(name="relay 2 x 2; 32; 9..30", shared=32, own=(9, 20, 30, 11), prefixes=2)
    return [
        plain,
        relay,
        dataclasses.replace(relay, target=None, **several),
        dataclasses.replace(plain, name="prefill 40", batch=1, own=40, queries=40),
        dataclasses.replace(plain, name="decode 3 x 70, fp8", fp8=True),
        dataclasses.replace(
            plain, name="decode 3 x 70, options", window=33, soft_cap=5.0, sinks=True
        ),
    ]


def peer_cases(*, small: bool) -> list[Case]:
    """The cases that kernels of other libraries support."""
    if small:
        return [case for case in small_cases() if not (case.fp8 or case.sinks)]
    by_name = {case.name: case for case in table_cases()}
    return [by_name[name] for name in _PEERS]


def _decode() -> list[Case]:
    lengths = tuple(int(x) for x in np.random.default_rng(0).integers(16, 16385, 64))
    copy = {share: Target(factor=1 / share) for share in (0.96, 0.95, 0.85, 0.75)}
    plain = Case("decode 64 x 2048", 64, 0, 2048, share="off", split=2048, target=copy[0.95])
    return [
        plain,
        Case("decode 16 x 8192", 16, 0, 8192, share="off", split=2048, target=copy[0.96]),
        Case("decode 256 x 512", 256, 0, 512, share="off", split=512, target=copy[0.85]),
        Case("decode 8 x 2048", 8, 0, 2048, share="off", split=512, target=copy[0.75]),
        Case(
            "decode 64 x 128", 64, 0, 128, share="off", split=128, target=Target(us=5, factor=2.0)
        ),
        Case("decode 64 x 16..16384", 64, 0, lengths, share="off", split=1024, target=copy[0.85]),
        dataclasses.replace(
            plain,
            name="decode 64 x 2048, relay path",
            share="on",
            tile_rows=32,
            target=Target(factor=1.03, of=plain.name),
        ),
    ]


def _prefix() -> list[Case]:
    """Attention to the shared prefix alone: every row's token is its last one."""
    return [
        Case(
            f"prefix {4 * batch} rows, {tokens}",
            batch,
            tokens,
            0,
            split=split,
            tile_rows=32,
            target=Target(us),
        )
        for batch, tokens, split, us in (
            (64, 2048, 256, 12),
            (64, 8192, 1024, 22),
            (64, 32768, 4096, 62),
            (256, 32768, 8192, 250),
        )
    ]


def _relay() -> list[Case]:
    one = Case("relay 64; 2048; 256", 64, 2048, 256, split=256, tile_rows=32, target=_RELAY)

    def like(name: str, **change: object) -> Case:
        return dataclasses.replace(one, name=name, **change)

    return [
        one,
        like("relay 64; 8192; 256", shared=8192, split=1024),
        like("relay 256; 2048; 256", batch=256, split=512),
        like("relay 64; 32768; 128", shared=32768, own=128, split=4096),
        like("relay 8 x 8; 2048; 256", prefixes=8, tile_rows=8, split=512),
        Case("one 2048; 128 unshared", 1, 2048, 128, share="off", split=128, target=Target(10)),
        Case("one 2048; 128", 1, 2048, 128, split=128, target=Target(10)),
    ]


def _prefill() -> list[Case]:
    flop = 4 * 32 * 128 * 8192 * 8193 / 2
    target = Target(us=1e6 * flop / (0.70 * 790e12))
    return [Case("prefill 8192", 1, 0, 8192, queries=8192, split=8192, tile_rows=32, target=target)]


def _fp8() -> list[Case]:
    return [
        dataclasses.replace(
            case,
            name=f"{case.name}, fp8",
            fp8=True,
            target=Target(factor=1 / 1.7, of=case.name),
        )
        for case in _decode()[:2]
    ] + [
        Case("relay 64; 2048; 256, fp8", 64, 2048, 256, split=256, tile_rows=32, fp8=True),
    ]


def _shapes() -> list[Case]:
    plain = _decode()[0]
    groups = [{"K": k, "tile_rows": 2 * k} for k in (32, 4, 2)]
    names = [f"G {32 // group['K']}" for group in groups]
    pages = [{"S": s} for s in (16, 32, 128)]
    dims = [{"H": h} for h in (64, 80, 96, 256)]
    names += [f"S {p['S']}" for p in pages] + [f"H {d['H']}" for d in dims]
    return [
        dataclasses.replace(plain, name=f"{plain.name}, {name}", target=None, **change)
        for name, change in zip(names, groups + pages + dims, strict=True)
    ]


def _split_heads() -> list[Case]:
    """Heads of 512 dims, 16 over 2 KV heads: a full attention layer of Gemma 4 26B-A4B."""
    heads = {"N": 16, "K": 2, "H": 512, "tile_rows": 8, "target": None}
    by_name = {case.name: case for case in (*_decode(), *_relay(), *_prefill(), *_fp8())}
    names = ("decode 64 x 2048", "decode 8 x 2048", "relay 64; 8192; 256", "one 2048; 128 unshared")
    return [
        dataclasses.replace(by_name[name], name=f"{name}, H 512", **heads)
        for name in (*names, "prefill 8192", "decode 64 x 2048, fp8")
    ]


def _options() -> list[Case]:
    """The cost of an option is the difference to the case without it."""
    base = _relay()[0]
    changes = {
        "soft cap": {"soft_cap": 30.0},
        "window 1024": {"window": 1024},
        "sinks": {"sinks": True},
    }
    return [
        dataclasses.replace(base, name=f"{base.name}, {name}", target=None, **change)
        for name, change in changes.items()
    ]
