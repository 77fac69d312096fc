"""A process whose memory is limited takes less, and says in one line where that is too little."""

import resource
import subprocess
import sys
from typing import NoReturn

import pytest

from rjax.cli.errors import run_command

MIB = 2**20
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems count otherwise")


def limited(kind: int, most: int, code: str) -> str:
    """What code prints in a process of its own under a limit that it cannot raise."""
    limit = f"import resource; resource.setrlimit({kind}, ({most}, {most})); "
    done = subprocess.run(
        [sys.executable, "-c", limit + code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


@needs_linux
@pytest.mark.parametrize("kind", [resource.RLIMIT_AS, resource.RLIMIT_DATA])
def test_what_the_process_may_take_bounds_what_the_host_has(kind: int):
    code = "from rjax.config.memory_sizes import *; print(host_memory(), available_memory())"
    host, available = map(int, limited(kind, 600 * MIB, code).split())
    assert host == 600 * MIB
    assert 0 < available < host


@needs_linux
def test_a_worker_keeps_the_limit_that_it_inherits():
    code = (
        "from rjax.serve.workers.memory import bound_memory; bound_memory(1 << 40)"
        "; print(resource.getrlimit(resource.RLIMIT_DATA)[0])"
    )
    assert int(limited(resource.RLIMIT_DATA, 900 * MIB, code)) == 900 * MIB


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."),
        ValueError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."),
    ],
)
def test_a_command_without_memory_says_it_in_one_line(error: Exception, capsys):
    def command() -> NoReturn:
        raise error

    assert run_command("it", command) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("it: error: ")
    assert "lower max_num_batched_tokens" in line


def test_another_error_keeps_its_traceback():
    def command() -> NoReturn:
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        run_command("it", command)


@needs_linux
def test_many_threads_allocate_from_few_arenas():
    assert 2 < _arenas("") <= 17
    assert _arenas("share_arenas()") == 2


@needs_linux
def test_free_memory_goes_back_to_the_system():
    code = f"""if True:
        import time
        from rjax.serve.workers import memory
        memory.TRIM_SECONDS = 0.1
        blocks = [b"x" * 4000 + bytes([i % 7]) for i in range(50_000)]
        kept = blocks[::500]  # so that no end of an arena is free
        del blocks
        held = memory.resident_bytes()
        time.sleep(0.5)
        assert memory.resident_bytes() > held - {10 * MIB}
        memory.keep_trimmed()
        while memory.resident_bytes() > held - {150 * MIB}:
            time.sleep(0.05)
        assert all(len(block) == 4001 for block in kept)
    """
    subprocess.run([sys.executable, "-c", code], timeout=300, check=True)


def _arenas(before: str) -> int:
    """Arenas of a process in which 16 threads allocate at once."""
    code = f"""if True:
        import ctypes, threading
        from rjax.serve.workers.memory import share_arenas
        {before}
        libc, barrier = ctypes.CDLL(None), threading.Barrier(16)
        def use():
            barrier.wait()
            for _ in range(1000):
                libc.malloc(ctypes.c_size_t(4096))
            barrier.wait()
        threads = [threading.Thread(target=use) for _ in range(16)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        stdout = ctypes.c_void_p.in_dll(libc, "stdout")
        libc.malloc_info(0, stdout)
        libc.fflush(stdout)
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.count("<heap nr=")
