"""Loading a prepared model folder: local files only, safetensors only, no code from the folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..devices import checked_device
from ..errors import DamagedFile, InvalidInput, said
from ..plain import NotPlain, read_json
from ..provenance import file_sha256
from .geometry import attention_geometry, check_architecture, check_sizes

if TYPE_CHECKING:
    import tokenizers
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

DTYPES = ("float32", "bfloat16", "float16")


def load_model(
    folder: str | os.PathLike, device: str = "cpu", dtype: str | torch.dtype | None = None
) -> PreTrainedModel:
    """Load the causal language model of a prepared folder, in evaluation mode.

    Parameters
    ----------
    folder : path
        Holds config.json and *.safetensors, as `prepare_model` leaves them.
    device : str
        Torch device.
    dtype : {"float32", "bfloat16", "float16"} or torch.dtype, optional
        Default: what source.json says; without that, what config.json says.

    Returns
    -------
    PreTrainedModel

    Raises
    ------
    InvalidInput
        A file is missing or damaged, weights are missing or have the wrong shape, the architecture is not
        supported, there is no such dtype or device.
    """
    folder = Path(folder)
    config = read_config(folder)
    _check_weights(folder)
    _check_sizes(folder)
    dtype = dtype if dtype is not None else read_source(folder).get("dtype") or _stored_dtype(config)

    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    if isinstance(dtype, str):
        if dtype.removeprefix("torch.") not in DTYPES:
            raise InvalidInput(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
        dtype = getattr(torch, dtype.removeprefix("torch."))
    device = checked_device(device)
    try:
        with quiet_transformers():
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                output_loading_info=True,
            )
    except (SafetensorError, OSError) as error:
        raise DamagedFile(folder / "model.safetensors", f"the weights cannot be read ({said(error)})") from error
    except Exception as error:  # a config or weights that are not what they say make transformers raise all kinds
        raise DamagedFile(folder / "config.json", f"the model cannot be loaded ({said(error)})") from error
    for kind in ("missing_keys", "mismatched_keys"):
        if info[kind]:
            first = sorted(map(str, info[kind]))[0]
            raise InvalidInput(
                f"{folder}: {len(info[kind])} weights are {kind.partition('_')[0]}, the first is {first}; "
                "the weights are not those of config.json: prepare the model again"
            )
    attention_geometry(model.config)
    return model.to(device).eval()


def load_config(folder: str | os.PathLike) -> PreTrainedConfig:
    """transformers' config of a model folder whose attention can be captured; no torch, no weights.

    Raises
    ------
    InvalidInput
        config.json is missing or damaged, or the architecture is not supported.
    """
    folder = Path(folder)
    path, described = folder / "config.json", read_config(folder)
    try:
        check_architecture(described.get("model_type"))
        check_sizes({key: value for key, value in described.items() if value is not None})
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        attention_geometry(config)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from error
    except Exception as error:  # transformers raises all kinds
        raise InvalidInput(f"{path}: no config of a model ({said(error)}); restore it") from error
    return config


def load_tokenizer(folder: str | os.PathLike) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a prepared folder; it adds BOS where the family has one.

    Raises
    ------
    InvalidInput
        tokenizer.json or tokenizer_config.json is missing or damaged.
    """
    folder = Path(folder)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        read_object(folder / file)
    load_encoder(folder)  # which says what is wrong with it
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises all kinds
        raise InvalidInput(
            f"{folder}: the tokenizer cannot be loaded ({said(error)}); prepare the model again"
        ) from error


def load_encoder(folder: str | os.PathLike) -> tokenizers.Tokenizer:
    """The same tokenizer as text -> ids and offsets alone, without transformers: loads in a third of the time.

    `prepare_model` makes sure that both give the same ids.

    Raises
    ------
    InvalidInput
        tokenizer.json is missing or damaged.
    """
    import tokenizers

    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise InvalidInput(f"{folder}: no tokenizer.json in the model folder; prepare the model first")
    try:
        encoder = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise DamagedFile(path, f"is not a tokenizer ({said(error)})") from error
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def read_config(folder: Path) -> dict:
    """config.json of a model folder."""
    if not folder.is_dir():
        raise InvalidInput(f"{folder}: there is no such model folder; prepare the model first")
    return read_object(folder / "config.json")


def read_source(folder: Path) -> dict:
    """source.json of a prepared folder; empty where there is none."""
    return read_object(folder / "source.json") if (folder / "source.json").exists() else {}


def read_object(path: Path) -> dict:
    """The object in a JSON file of a model folder."""
    try:
        value = read_json(path)
    except FileNotFoundError:
        raise InvalidInput(f"{path.parent}: no {path.name} in the model folder") from None
    except (OSError, NotPlain) as error:
        raise DamagedFile(path, f"is not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise DamagedFile(path, f"expected a JSON object, got {type(value).__name__}")
    return value


def prepared_files(folder: Path) -> dict[str, str]:
    """SHA-256 of what decides the forward pass: config, weights, and source.json, which names the dtype.

    Raises
    ------
    InvalidInput
        There are no weights, or a file is not the one that was prepared, where source.json says what that was.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise InvalidInput(f"{folder}: no *.safetensors in the model folder; prepare the model first")
    others = [file for file in (folder / "config.json", folder / "source.json") if file.exists()]
    files = {file.name: file_sha256(file) for file in [*others, *weights]}
    for file, prepared in (read_source(folder).get("files") or {}).items():
        if (found := files.get(file, prepared)) != prepared:
            raise DamagedFile(
                folder / file,
                f"is not the file that was prepared: SHA-256 {found[:12]}..., expected {prepared[:12]}...",
            )
    return files


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No bar over the loading of weights: in a log file each step of it is a line."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _check_weights(folder: Path) -> None:
    if not any(folder.glob("*.safetensors")):
        other = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(kind))
        only = f"; {other[0]} cannot be used: convert it to safetensors" if other else ""
        raise InvalidInput(f"{folder}: no *.safetensors in the model folder{only}")


def _check_sizes(folder: Path) -> None:
    """Stop before a model is built whose sizes its weights cannot fill: building takes what config.json says."""
    config = load_config(folder)
    geometry = attention_geometry(config)
    hidden, rows = config.hidden_size, geometry.layers * geometry.heads * geometry.head_dim
    least = hidden * (rows + config.vocab_size + geometry.layers * config.intermediate_size)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if least > size:
        raise InvalidInput(
            f"{folder / 'config.json'}: its sizes take {least} weights or more, the *.safetensors have {size} bytes; "
            "they are not of this model: prepare it again"
        )


def _stored_dtype(config: dict) -> str:
    return config.get("dtype") or config.get("torch_dtype") or "float32"
