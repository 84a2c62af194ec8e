"""Compile the kernels for a GPU, where there need be none; print what their machine code is made of, as JSON.

    python compile_kernels.py

Triton takes a target, and carries the assembler. One line a case: registers, bytes of shared memory and of stack, and
how often each of a few instructions occurs in the machine code.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from contourkv.ragged import split_k

HOPPER, ADA = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 89, 32)
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
POINTERS = {"positions": "i32", "begin": "i64", "end": "i64", "tail_length": "i64", "tail_first": "i64"}
POINTERS |= {"visible": "u8", "sums": "fp32", "levels": "fp32", "sinks": "fp32"}
NUMBERS = {"factor": "fp32", "cap": "fp32"}
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def compiled(
    kernel: object, dtype: torch.dtype, constants: dict[str, object], target: GPUTarget = HOPPER, **options: object
) -> dict:
    """One kernel with these constants, all pointers and strides divisible by 16, as they are in a layer."""
    signature, fixed, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], fixed[(index,)] = "constexpr", constants[name]
            continue
        element = POINTERS.get(name) or (
            ELEMENTS[dtype] if name in ("query", "keys", "values", "tail_keys", "tail_values", "output") else None
        )
        signature[name] = f"*{element}" if element else NUMBERS.get(name, "i32")
        if element or (name not in NUMBERS and name not in split_k.CHANGING):
            attributes[(index,)] = [["tt.divisibility", 16]]
    made = triton.compile(ASTSource(kernel, signature, fixed, attributes), target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True)
        code = subprocess.run([TOOLS / "nvdisasm", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr).groups()
    counts = {name: len(re.findall(rf"\b{re.escape(name)}\b", code)) for name in ("HMMA", "HGMMA", "ACQBULK")}
    counts["copies"] = len(re.findall(r"\bLDGSTS\.", code))
    counts["wide copies"] = len(re.findall(r"\bLDGSTS\.\S*\b128\b", code))
    return {"registers": int(registers), "stack": int(stack), "shared": made.metadata.shared, **counts}


def split(
    dtype: torch.dtype, size: int, value_size: int, rows: int = 1, options: bool = False, small: bool = False
) -> dict:
    """The first kernel as `attend` asks for it; with `options` everything that can be switched on."""
    config = split_k.default_config(dtype, size, value_size, 99 * 1024 if small else 227 * 1024)
    row_block = min(config.rows, max(split_k.NARROW, triton.next_power_of_2(4 * rows)))
    constants = {
        "ONE_ROW": rows == 1,
        "SIZE": size,
        "VALUE_SIZE": value_size,
        "ROW_BLOCK": row_block,
        "SIZE_BLOCK": triton.next_power_of_2(size),
        "VALUE_BLOCK": triton.next_power_of_2(value_size),
        "RUN_BLOCK": 64,
        "CHUNK": config.chunk,
        "LENGTH_ON_DEVICE": True,
        "FIRST_ON_DEVICE": True,
        "WINDOW": options,
        "SOFTCAP": options,
        "PADDED": options,
        "UPCAST": False,
        "PRECISION": config.precision,
        "OVERLAP": options,
        "query_column": 1,
    }
    if not options:
        constants["visible"] = None
    narrow = row_block == split_k.NARROW
    warps = config.warps if narrow else 2 * config.warps
    target = ADA if small else HOPPER
    found = compiled(split_k._split, dtype, constants, target, num_warps=warps, num_stages=config.stages)
    name = f"{ELEMENTS[dtype]} {size} {value_size} x{rows}{' options' * options}{' small' * small}"
    return {"name": name, "warps": warps, "programs": config.programs if narrow else 1, **found}


def join(dtype: torch.dtype) -> dict:
    """The second kernel, launched while the first still runs."""
    constants = {
        "HEADS": 8,
        "GROUP": 4,
        "VALUE_SIZE": 128,
        "VALUE_BLOCK": 128,
        "RUN_BLOCK": 64,
        "PART_BLOCK": split_k.PART_BLOCK,
        "CHUNK": 64,
        "LENGTH_ON_DEVICE": True,
        "SINKS": True,
        "OVERLAP": True,
    }
    found = compiled(split_k._join, dtype, constants, num_warps=4, launch_pdl=True)
    return {"name": f"join {ELEMENTS[dtype]}", "warps": 4, "programs": 1, **found}


def main() -> None:
    half, full = torch.bfloat16, torch.float32
    for dtype, size, value_size in (
        (half, 64, 64),
        (half, 80, 80),
        (torch.float16, 96, 96),
        (half, 128, 128),
        (half, 256, 256),
        (full, 128, 128),
        (full, 256, 256),
    ):
        print(json.dumps(split(dtype, size, value_size)), flush=True)
    print(json.dumps(split(half, 192, 128, options=True)), flush=True)
    print(json.dumps(split(half, 128, 128, rows=16)), flush=True)
    for dtype, size in ((half, 128), (half, 256), (full, 256)):
        print(json.dumps(split(dtype, size, size, rows=16, small=True)), flush=True)
    print(json.dumps(join(half)), flush=True)


if __name__ == "__main__":
    main()
