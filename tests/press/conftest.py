"""Tiny models in folders of their own, with tokenizers, as kvpress wants them."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from contourkv.models.loading import load_model
from contourkv.models.random_source import make_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = {}
    for architecture in ("llama", "qwen2", "qwen3", "gemma3_text", "olmo2"):
        made[architecture] = tmp_path_factory.mktemp(architecture)
        make_model({"architecture": architecture, "seed": 3}, made[architecture], architecture)
    return made


@pytest.fixture(scope="module")
def models(folders) -> dict[str, transformers.PreTrainedModel]:
    return {architecture: load_model(folder) for architecture, folder in folders.items()}
