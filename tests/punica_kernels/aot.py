"""Compiles every kernel as its launches ask for it, for devices that nobody needs to have.

The public functions are called with tensors that have shapes and no memory; what they would have
launched is caught and compiled. So the constants and the tiles are those of real use.
"""

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from punica_kernels.triton_tiles import Family

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
_WARP_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A kernel with the arguments that it was launched with, by name."""

    name: str
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a compiled kernel takes. Spills go to local memory, so its bytes are none without."""

    registers: int
    local_bytes: int
    shared_bytes: int


@contextmanager
def caught_launches() -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Collect (kernel, arguments and options) of every launch instead of making it."""
    caught: list[tuple[Any, dict[str, Any]]] = []

    def catch(self: Any, *arguments: Any, grid: Any, warmup: Any, **named: Any) -> None:
        caught.append((self, dict(zip(self.arg_names, arguments, strict=False)) | named))

    with patch.object(JITFunction, "run", catch):
        yield caught


def launches_of(name: str, *calls: Callable[[], object]) -> list[Launch]:
    """Return what `calls` launch, each named after its kernel and `name`."""
    with caught_launches() as caught:
        for call in calls:
            call()
    launches = []
    for kernel, named in caught:
        options = {key: named.pop(key) for key in _OPTIONS}
        short = kernel.__name__.removesuffix("_kernel")
        launches.append(
            Launch(name=f"{short} {name}", kernel=kernel, arguments=named, options=options)
        )
    return launches


def compile_all(launches: list[Launch], family: Family, folder: Path) -> dict[str, Usage]:
    """Compile every launch for a family; `folder` takes the compiler's files.

    One after the other: CPython's parser isn't safe in two threads at once (gh-106905).
    """
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        usages = [_compile(launch, family, folder) for launch in launches]
    return {launch.name: usage for launch, usage in zip(launches, usages, strict=True)}


def _compile(launch: Launch, family: Family, folder: Path) -> Usage:
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        specialised = not (parameter.is_constexpr or parameter.do_not_specialize)
        if parameter.is_constexpr or (specialised and type(value) is int and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = _type_of(value)
        aligned = isinstance(value, Tensor) or (type(value) is int and value % 16 == 0)
        if specialised and aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes
    )
    target = GPUTarget("cuda", int(family.removeprefix("sm_")), _WARP_SIZE)
    compiled = triton.compile(source, target=target, options=launch.options)
    cubin = folder / f"{compiled.hash}.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    listing = subprocess.run(
        [tool, "-res-usage", str(cubin)], check=True, capture_output=True, text=True
    ).stdout
    cubin.unlink()
    return Usage(
        registers=_number(listing, "REG"),
        local_bytes=_number(listing, "STACK") + _number(listing, "LOCAL"),
        shared_bytes=compiled.metadata.shared,
    )


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if abs(value) < 2**31 else "i64"


def _number(listing: str, key: str) -> int:
    (found,) = re.findall(rf"\b{key}:(\d+)", listing)
    return int(found)


def as_text(table: dict[Family, dict[str, Usage]]) -> str:
    """Return one line a kernel: registers, local and shared bytes in each family."""
    names = list(next(iter(table.values())))
    head = "registers / spilled / shared bytes"
    lines = [f"{head:40}" + "".join(f"{family:>20}" for family in table)]
    for name in names:
        of_name = [usages[name] for usages in table.values()]
        cells = [f"{one.registers} / {one.local_bytes} / {one.shared_bytes}" for one in of_name]
        lines.append(f"{name:40}" + "".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines)
