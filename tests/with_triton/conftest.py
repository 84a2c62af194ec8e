"""Tests of the Triton kernels: `make test-triton` runs them in Triton's interpreter, `pytest tests` leaves them out.

Without TRITON_INTERPRET=1 they run on a GPU. Where there is neither triton nor one of the two they fail.
"""

from __future__ import annotations

import os

import pytest
import torch

try:
    from triton import __version__  # noqa: F401
except ImportError:
    raise pytest.UsageError("triton is not installed: make test-triton") from None

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    raise pytest.UsageError("there is no GPU: set TRITON_INTERPRET=1, or make test-triton")
