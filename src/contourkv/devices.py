"""Where tensors are computed: a device by name, checked, or the CPU where there is no GPU."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .errors import InvalidInput

if TYPE_CHECKING:
    import torch


def checked_device(name: str | torch.device) -> torch.device:
    """The torch device of that name.

    Raises
    ------
    InvalidInput
        torch knows none of that name, or cannot use it here.
    """
    import torch

    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(
            f"device: {name!r} is none that torch knows; expected cpu, cuda or cuda:<n> ({reason})"
        ) from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidInput(
            f"device: {name} was asked for, torch sees {torch.cuda.device_count()} CUDA devices; use cpu"
        )
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(f"device: {name!r} cannot be used here ({reason}); use cpu") from None
    return device


def device_name(device: str | torch.device) -> str:
    """What results call a device: its name, and which GPU it is, as nodes of a cluster may have different ones.

    Raises
    ------
    InvalidInput
        There is no such CUDA device.
    """
    if not str(device).startswith("cuda"):  # without importing torch
        return str(device)
    import torch

    return f"{device} ({torch.cuda.get_device_name(checked_device(device))})"


def usable_device(name: str) -> str:
    """`name`; "cpu", and one line on stderr that says so, where it is a CUDA device and there is none.

    Raises
    ------
    InvalidInput
        Any other device that cannot be used here.
    """
    if name == "cpu":  # without importing torch
        return name
    import torch

    if name.partition(":")[0] == "cuda" and not torch.cuda.is_available():
        print(f"device: {name} was asked for and there is no CUDA device here: computed on the CPU", file=sys.stderr)
        return "cpu"
    return str(checked_device(name))
