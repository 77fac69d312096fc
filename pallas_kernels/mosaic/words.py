"""Words in device memory that tell by their bits whether they have arrived.

A sender stores float32 numbers as int32 words and the receiver polls the words themselves: there
are no flags and no fences, so a message takes one trip. An unwritten word holds ``EMPTY``, the bits
of -0.0, which no sender sends (it sends 0.0 in its place). Words are moved by relaxed accesses of
up to 16 bytes; each word of such an access is atomic by itself, which is all that this needs.
Source: the low-latency protocol of NCCL.
"""

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from rjax.pallas_kernels.mosaic.emit import add, i32, i32_type

EMPTY = -(2**31)
"""An unwritten word, as int32: the bits of -0.0."""


def store_words(address, words, order: str) -> None:
    """Store 1, 2 or 4 int32 words at an address (int64).

    order: "relaxed.sys." for receivers on other devices, "relaxed.gpu." on this one, or "".
    """
    store_vector(f"st.{order}global", address, words)


MOST_POLLS = 2**24
"""Polls after which a thread that waits for CTAs of its own launch traps: 10 seconds or more.

An error ends the process that runs the kernel; a launch that waits for ever holds the GPU.
"""


def poll_words(vectors, scope: str):
    """The words of vectors, each an address (int64) and a size, as soon as none is ``EMPTY``.

    scope: "sys" for words from other devices, which may be busy for any time; "gpu" for those of
        this launch, which traps after ``MOST_POLLS`` polls.
    """
    types = [i32_type()] * sum(size for _, size in vectors)
    loop = scf.WhileOp([*types, i32_type()], [i32(0)])
    before, load = loop.before.blocks.append(i32_type()), f"ld.relaxed.{scope}.global"
    with ir.InsertionPoint(before):
        words = [word for address, size in vectors for word in load_vector(load, address, size)]
        least = words  # EMPTY is the smallest int32; a tree, so that few steps wait for another
        while len(least) > 1:
            pairs = zip(least[::2], least[1::2], strict=False)
            rest = least[-1:] if len(least) % 2 else []
            least = [arith.minsi(a, b) for a, b in pairs] + rest
        is_empty = arith.cmpi(arith.CmpIPredicate.eq, least[0], i32(EMPTY))
        scf.condition(is_empty, [*words, before.arguments[0]])
    after = loop.after.blocks.append(*types, i32_type())
    with ir.InsertionPoint(after):
        polls = after.arguments[-1]
        scf.yield_([count_poll(polls) if scope == "gpu" else polls])
    return list(loop.results)[:-1]


def count_poll(polls):
    """The number of polls after one more, as int32; traps at ``MOST_POLLS``."""
    polls = add(polls, 1)
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [polls],
        f"{{ .reg .pred p; setp.eq.u32 p, $0, {MOST_POLLS}; @p trap; }}",
        "r",
        has_side_effects=True,
    )
    return polls


def store_vector(instruction: str, address, words, offset: int = 0) -> None:
    """Store 1, 2 or 4 int32 words by one instruction, such as "st.shared".

    address: int64, or int32 in shared memory. offset: bytes behind it.
    """
    size = len(words)
    names = ", ".join(f"${i + 1}" for i in range(size))
    llvm.inline_asm(
        ir.Type.parse("!llvm.void"),
        [address, *words],
        f"{instruction}.{_TYPES[size]} [$0+{offset}], {{{names}}};",
        ",".join([_register(address), *["r"] * size]),
        has_side_effects=True,
    )


def load_vector(instruction: str, address, size: int, offset: int = 0):
    """Load 1, 2 or 4 int32 words by one instruction; arguments as in `store_vector`."""
    names = ", ".join(f"${i}" for i in range(size))
    names = names if size == 1 else f"{{{names}}}"
    form = f"{instruction}.{_TYPES[size]} {names}, [${size}+{offset}];"
    constraints = ",".join([*["=r"] * size, _register(address)])
    one = i32_type()
    if size == 1:
        return [llvm.inline_asm(one, [address], form, constraints, has_side_effects=True)]
    struct = llvm.StructType.get_literal([one] * size)
    found = llvm.inline_asm(struct, [address], form, constraints, has_side_effects=True)
    return [llvm.extractvalue(one, found, [i]) for i in range(size)]


_TYPES = {1: "b32", 2: "v2.b32", 4: "v4.b32"}


def _register(address) -> str:
    return "r" if address.type == i32_type() else "l"
