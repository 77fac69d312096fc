"""Compiles Mosaic kernels to machine code without a GPU, with the CUDA plugin of JAX and ptxas.

The plugin asks the driver only for the GPU model, so it gets a stub driver that reports Hopper.
"""

import dataclasses
import glob
import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.machine_code.left_operands import lost_operands

_ARCHITECTURE = "sm_90a"
_DRIVER = """
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) {
  *value = which == 75 ? 9 : which == 76 ? 0 : 1;  /* compute capability 9.0 */
  return 0;
}
int cuGetErrorName(int error, const char **text) { *text = "no GPU"; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "no GPU"; return 0; }
"""

_COMPILE = """
import ctypes, sys
plugin = ctypes.CDLL(sys.argv[1])
plugin.MosaicGpuCompile.restype = ctypes.c_void_p
plugin.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
module = open(sys.argv[2], "rb").read()
plugin.MosaicGpuCompile(module, len(module))
ctypes.CDLL(None).fflush(None)
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Tools:
    """The compiler tools.

    Attributes:
        plugin: JAX's CUDA plugin, a shared library.
        ptxas: the assembler.
        compiler: the C compiler.
        nvdisasm: the disassembler, or None.
        relocatable: whether kernels become relocatable objects, as nvJitLink makes them.
    """

    plugin: Path
    ptxas: Path
    compiler: Path
    nvdisasm: Path | None
    relocatable: bool = False


def find_tools(
    plugin: Path | None = None, ptxas: Path | None = None, nvdisasm: Path | None = None
) -> Tools:
    """The given tools, or those of the environment and the machine.

    Raises:
        FileNotFoundError: a tool is missing; the message says how to get it.
    """
    plugin = plugin or _first("jax_plugins", "xla_cuda1*/xla_cuda_plugin.so")
    ptxas = ptxas or _first("nvidia", "**/bin/ptxas")
    if ptxas is None:
        ptxas = next((Path(p) for p in glob.glob("/usr/local/cuda*/bin/ptxas")), None)
    compiler = shutil.which("cc")
    needed = {
        "JAX's CUDA plugin (the extra cuda13 brings it, or --plugin)": plugin,
        "the assembler ptxas (the extra cuda13 brings it, or --ptxas)": ptxas,
        "a C compiler named cc": compiler and Path(compiler),
    }
    if nvdisasm is not None:
        needed["the disassembler nvdisasm"] = nvdisasm
    for name, path in needed.items():
        if path is None or not path.exists():
            raise FileNotFoundError(f"{name} is missing" + (f": {path}" if path else ""))
    assert plugin is not None and ptxas is not None and compiler is not None
    nvdisasm = nvdisasm or _first("nvidia", "**/bin/nvdisasm")
    nvdisasm = nvdisasm or _first("triton", "backends/nvidia/bin/nvdisasm")
    return Tools(plugin.resolve(), ptxas.resolve(), Path(compiler), nvdisasm)


def _first(package: str, pattern: str) -> Path | None:
    found = importlib.util.find_spec(package)
    folders = list(found.submodule_search_locations or ()) if found else []
    return next((path for x in folders for path in Path(x).glob(pattern)), None)


def version(tools: Tools) -> str:
    """The name and version of the assembler."""
    found = re.search(r"release [\d.]+, V([\d.]+)", _run([tools.ptxas, "--version"]))
    return f"ptxas {found[1]}" if found else "ptxas"


def assembled(modules: Iterable[bytes], tools: Tools) -> Iterator[tuple[dict[str, Any], str]]:
    """(report of the assembler, PTX) of each kernel.

    Raises:
        RuntimeError: the plugin, the assembler or the C compiler failed; with what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "driver.c").write_text(_DRIVER)
        _run([tools.compiler, "-shared", "-fPIC", "-o", here / "libcuda.so.1", here / "driver.c"])
        for module in modules:
            text = _ptx(module, here, tools)
            source, binary = here / "kernel.ptx", here / "kernel.cubin"
            source.write_text(text)
            options = [f"-arch={_ARCHITECTURE}", "-v", *(["-c"] if tools.relocatable else [])]
            said = _run([tools.ptxas, *options, source, "-o", binary])
            lost = None
            if tools.nvdisasm is not None:
                lost = len(lost_operands(_run([tools.nvdisasm, "-c", binary])))
            size = code_bytes(binary.read_bytes())
            yield what_ptxas_says(said) | {"code_bytes": size, "lost_operands": lost}, text


def _run(command: Sequence[str | Path]) -> str:
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {_last_line(done.stderr)}")
    return done.stdout + done.stderr


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def _ptx(module: bytes, folder: Path, tools: Tools) -> str:
    """PTX from the plugin, which loads the stub driver from ``folder``."""
    path = folder / "kernel.mlirbc"
    path.write_bytes(module)
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(folder),
        "PATH": f"{tools.ptxas.parent}:{os.environ.get('PATH', '')}",
        "MOSAIC_GPU_DUMP_PTX": "1",
    }
    # A separate process: the plugin prints to stderr.
    command = [sys.executable, "-c", _COMPILE, str(tools.plugin), str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = re.search(r"^\.version.*?^}$", done.stdout, re.DOTALL | re.MULTILINE)
    if found is None:
        raise RuntimeError(f"the plugin made no PTX: {_last_line(done.stderr)}")
    return found[0] + "\n"


def what_ptxas_says(text: str) -> dict[str, Any]:
    """Parse kernel, registers, spilled bytes and notes from the output of ``ptxas -v``."""
    name = re.search(r"Compiling entry function '(\w+)'", text)
    registers = re.search(r"Used (\d+) registers", text)
    spilled = re.search(r"(\d+) bytes spill stores", text)
    if name is None or registers is None or spilled is None:
        raise RuntimeError(f"ptxas said nothing of a kernel: {_last_line(text)}")
    return {
        "kernel": name[1].removesuffix("_mosaic_gpu_kernel").removesuffix("_kernel"),
        "registers": int(registers[1]),
        "spilled_bytes": int(spilled[1]),
        # C7519 only reports an instruction that wgmma needs.
        "notes": " ".join(sorted(set(re.findall(r"C75\d\d", text)) - {"C7519"})),
    }


def code_bytes(elf: bytes) -> int:
    """Bytes of all kernels in an object file: the sections that are named ``.text.``."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    strings = headers[names][4]
    return sum(h[5] for h in headers if elf.startswith(b".text.", strings + h[0]))
