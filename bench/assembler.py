"""Machine code of Mosaic kernels without a GPU: JAX's CUDA plugin to PTX, and the assembler.

The plugin asks the driver only which GPU there is, so a driver is made up for it that says Hopper.
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
from pathlib import Path
from typing import Any

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
    """The programs that make machine code.

    Attributes:
        plugin: JAX's CUDA plugin, a shared library.
        ptxas: the assembler.
        compiler: of C.
    """

    plugin: Path
    ptxas: Path
    compiler: Path


def find_tools(plugin: Path | None = None, ptxas: Path | None = None) -> Tools:
    """Those given, else those of this environment and this machine.

    Raises:
        FileNotFoundError: one is missing; says which, and how to come by it.
    """
    plugin = plugin or _first("jax_plugins", "xla_cuda1*/xla_cuda_plugin.so")
    ptxas = ptxas or _first("nvidia", "**/bin/ptxas")
    if ptxas is None:
        ptxas = next((Path(p) for p in glob.glob("/usr/local/cuda*/bin/ptxas")), None)
    compiler = shutil.which("cc")
    needed = {
        "JAX's CUDA plugin (pip install 'jax[cuda13]', or --plugin)": plugin,
        "the assembler ptxas (it comes with the same, or --ptxas)": ptxas,
        "a C compiler named cc": compiler and Path(compiler),
    }
    for name, path in needed.items():
        if path is None or not path.exists():
            raise FileNotFoundError(f"{name} is missing" + (f": {path}" if path else ""))
    assert plugin is not None and ptxas is not None and compiler is not None
    return Tools(plugin.resolve(), ptxas.resolve(), Path(compiler))


def _first(package: str, pattern: str) -> Path | None:
    found = importlib.util.find_spec(package)
    folders = list(found.submodule_search_locations or ()) if found else []
    return next((path for x in folders for path in Path(x).glob(pattern)), None)


def version(tools: Tools) -> str:
    """Of the assembler."""
    said = subprocess.run([str(tools.ptxas), "--version"], capture_output=True, text=True).stdout
    found = re.search(r"release [\d.]+, V([\d.]+)", said)
    return f"ptxas {found[1]}" if found else "ptxas"


def assemble(module: bytes, tools: Tools) -> tuple[dict[str, Any], str]:
    """(what the assembler says, PTX) of one kernel.

    Raises:
        RuntimeError: the plugin or the assembler failed; with what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        source, binary = here / "kernel.ptx", here / "kernel.cubin"
        (here / "kernel.mlirbc").write_bytes(module)
        (here / "driver.c").write_text(_DRIVER)
        library = [str(tools.compiler), "-shared", "-fPIC", "-o", "libcuda.so.1", "driver.c"]
        subprocess.run(library, cwd=here, check=True)
        path = f"{tools.ptxas.parent}:{os.environ.get('PATH', '')}"
        environment = os.environ | {
            "LD_LIBRARY_PATH": folder,
            "PATH": path,
            "MOSAIC_GPU_DUMP_PTX": "1",
        }
        # A process of its own: the plugin prints to it, and fails when it has.
        command = [sys.executable, "-c", _COMPILE, str(tools.plugin), str(here / "kernel.mlirbc")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        found = re.search(r"^\.version.*?^}$", done.stdout, re.DOTALL | re.MULTILINE)
        if found is None:
            raise RuntimeError(f"the plugin made no PTX: {done.stderr.strip()[-500:]}")
        source.write_text(found[0] + "\n")
        command = [str(tools.ptxas), f"-arch={_ARCHITECTURE}", "-v", str(source)]
        done = subprocess.run([*command, "-o", str(binary)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ptxas failed: {done.stderr.strip()[-500:]}")
        said = what_ptxas_says(done.stdout + done.stderr)
        return said | {"code_bytes": code_bytes(binary.read_bytes())}, found[0]


def what_ptxas_says(text: str) -> dict[str, Any]:
    """Kernel, registers, spilled bytes and notes out of ``ptxas -v``."""
    name = re.search(r"Compiling entry function '(\w+)'", text)
    registers = re.search(r"Used (\d+) registers", text)
    spilled = re.search(r"(\d+) bytes spill stores", text)
    if name is None or registers is None or spilled is None:
        raise RuntimeError(f"ptxas said nothing of a kernel: {text.strip()[-500:]}")
    return {
        "kernel": name[1].removesuffix("_mosaic_gpu_kernel").removesuffix("_kernel"),
        "registers": int(registers[1]),
        "spilled_bytes": int(spilled[1]),
        # C7519 only says that the assembler has put in an instruction that products need.
        "notes": " ".join(sorted(set(re.findall(r"C75\d\d", text)) - {"C7519"})),
    }


def code_bytes(elf: bytes) -> int:
    """Of all kernels in an object file: the sections that are named ``.text.``."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    strings = headers[names][4]
    return sum(h[5] for h in headers if elf.startswith(b".text.", strings + h[0]))
