"""The command `contourkv`: what a cache would hold, from a prefill that really happens.

    contourkv bytes --model FOLDER --press adakv_snapkv,kvzip,contourkv --ratio 0.5,0.75

Exit status: 0 done, 1 a press failed (its row says why, the others stand), 2 the request makes no sense, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import csv
import inspect
import io
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ContourKVError, InvalidInput
from .press.quiet import quiet_kvpress

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
FULL, OURS = "full", "contourkv"
# A prefix gives the press that spreads the budget, or reweighs, the scores named after it.
WRAPPERS = {
    "adakv_": "AdaKVPress",
    "criticalkv_": "CriticalKVPress",
    "critical_adakv_": "CriticalAdaKVPress",
}
PRESS_ONLY = {"pyramidkv": "PyramidKVPress"}
DEFAULT_TOKENS = 1024


@dataclass(frozen=True)
class Row:
    """One measurement. Bytes are null where the press failed; then `error` says why.

    Attributes
    ----------
    press : name as asked; enforced(name) where its selection was moved into a RaggedCache
    ratio : fraction removed
    nominal : (1 - ratio) times the full cache's payload
    payload, slack, metadata, total : bytes held, see `contourkv.held.Held`
    held_over_nominal, held_over_full : total, over the nominal bytes and over the full cache's total
    """

    press: str
    ratio: float
    nominal: int
    payload: int | None = None
    slack: int | None = None
    metadata: int | None = None
    total: int | None = None
    held_over_nominal: float | None = None
    held_over_full: float | None = None
    error: str | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status. Bad usage that argparse finds leaves with SystemExit(2)."""
    asked = _parser().parse_args(arguments)
    try:
        with quiet_kvpress():
            rows = measure(asked)
    except ContourKVError as error:
        print(f"contourkv {asked.command}: {error}", file=sys.stderr)
        return USAGE if isinstance(error, InvalidInput) else FAILED
    except KeyboardInterrupt:
        print(f"contourkv {asked.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    try:
        print(FORMATS[asked.format](rows), end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails once more at exit
        if not isinstance(error, BrokenPipeError):  # whoever reads has read enough
            print(f"contourkv {asked.command}: cannot write: {error.strerror}", file=sys.stderr)
            return FAILED
    failed = [row for row in rows if row.error]
    for row in failed:
        print(f"contourkv {asked.command}: {row.press} at ratio {row.ratio:g} failed: {row.error}", file=sys.stderr)
    return FAILED if failed else DONE


def measure(asked: argparse.Namespace) -> list[Row]:
    """Rows of `contourkv bytes`: the full cache first, then each press at each ratio."""
    names = _names(asked.press)
    ratios = _ratios(asked.ratio)
    folder = _folder(asked.model)
    presses = [(name, ratio) for name in names for ratio in ratios]
    for name, ratio in presses:  # names and ratios are refused before a model is loaded
        make_press(name, ratio)

    import torch

    from .models.loading import load_model, quiet_transformers

    model = load_model(folder, dtype=asked.dtype)
    ids = _context(asked, folder, model)
    rows: list[Row] = []
    with quiet_transformers(), torch.no_grad(), torch.random.fork_rng():
        full = _prefill_full(model, ids)
        rows.append(_row(FULL, 0.0, full.payload, full, full.total))
        for name, ratio in presses:
            if name == FULL:
                continue
            ways: list[tuple[str, Callable]] = [(name, _over_ragged if name == OURS else _over_dynamic)]
            if asked.enforce and name != OURS:
                ways.append((f"enforced({name})", _over_enforced))
            for shown, way in ways:
                torch.manual_seed(asked.seed)
                nominal = round((1 - ratio) * full.payload)
                try:
                    held = way(model, ids, make_press(name, ratio))
                except Exception as error:  # whatever a press raises is its row's; the others go on
                    rows.append(Row(shown, ratio, nominal, error=_said(error)))
                else:
                    rows.append(_row(shown, ratio, nominal, held, full.total))
    return rows


def make_press(name: str, ratio: float) -> Any:
    """The press called `name`, removing the fraction `ratio`; None for the full cache.

    Raises
    ------
    InvalidInput
        There is no such press, or kvpress is not installed.
    """
    from .press.scores import PRESSES, kvpress

    if name == FULL:
        return None
    if name == OURS:
        from .press.contour import ContourKVPress

        return ContourKVPress(compression_ratio=ratio)
    plain = {**PRESSES, **PRESS_ONLY}
    if name in plain:
        return getattr(kvpress(), plain[name])(compression_ratio=ratio)
    for prefix in sorted(WRAPPERS, key=len, reverse=True):
        inner = name.removeprefix(prefix)
        if inner != name and inner in PRESSES and inner != "kvzip":
            # CriticalKV wants expected attention without its own factor ||v||.
            options = {"use_vnorm": False} if prefix != "adakv_" and inner == "expected_attention" else {}
            scorer = getattr(kvpress(), PRESSES[inner])(compression_ratio=ratio, **options)
            return getattr(kvpress(), WRAPPERS[prefix])(scorer)
    raise InvalidInput(
        f"--press: unknown press {name!r}; expected {FULL}, {OURS}, {', '.join(sorted(plain))}, or one of "
        f"{', '.join(prefix + 'NAME' for prefix in WRAPPERS)} with NAME among {', '.join(sorted(PRESSES))}"
    )


def _over_dynamic(model: PreTrainedModel, ids: torch.Tensor, press: Any) -> Any:
    from transformers import DynamicCache

    from .held import held_bytes
    from .press.scores import untouched

    cache = DynamicCache()
    with untouched(model):
        with press(model):
            _read(model, ids, cache)
        return held_bytes(cache, model)


def _over_ragged(model: PreTrainedModel, ids: torch.Tensor, press: Any) -> Any:
    from .held import held_bytes
    from .ragged.cache import RaggedCache

    cache = RaggedCache(model.config)
    with press(model):
        _read(model, ids, cache)
    return held_bytes(cache, model)


def _over_enforced(model: PreTrainedModel, ids: torch.Tensor, press: Any) -> Any:
    from .press.enforced import enforce

    return _over_ragged(model, ids, enforce(press))


def _prefill_full(model: PreTrainedModel, ids: torch.Tensor) -> Any:
    from transformers import DynamicCache

    from .held import held_bytes

    # As transformers itself makes it: sliding layers hold their window.
    cache = DynamicCache(config=model.config)
    _read(model, ids, cache)
    return held_bytes(cache)


def _read(model: PreTrainedModel, ids: torch.Tensor, cache: Any) -> None:
    """Prefill; only the last position's logits are computed."""
    # transformers is renaming the argument: 5.2 knows one name, newest 5.x deprecates it.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    model(ids, logits_to_keep=1, **{name: cache})


def _row(press: str, ratio: float, nominal: int, held: Any, full: int) -> Row:
    return Row(
        press, ratio, nominal, held.payload, held.slack, held.metadata, held.total,
        held.total / nominal if nominal else None, held.total / full,
    )  # fmt: skip


def _said(error: Exception) -> str:
    from .press.scores import first_line

    return first_line(error) if isinstance(error, ContourKVError) else f"{type(error).__name__}: {first_line(error)}"


# ---------------------------------------------------------------------- what is asked


def _names(given: str) -> list[str]:
    names = [name.strip() for name in given.split(",") if name.strip()]
    if not names:
        raise InvalidInput(f"--press: expected names such as {OURS},adakv_snapkv, got {given!r}")
    return list(dict.fromkeys(names))


def _ratios(given: str) -> list[float]:
    ratios = []
    for text in given.split(","):
        try:
            ratio = float(text)
        except ValueError:
            raise InvalidInput(f"--ratio: expected numbers such as 0.5,0.75, got {given!r}") from None
        if not 0 <= ratio < 1:
            raise InvalidInput(f"--ratio: expected the fraction to remove, at least 0 and under 1, got {text.strip()}")
        ratios.append(ratio)
    return list(dict.fromkeys(ratios))


def _folder(model: str) -> Path:
    """A local folder; of a hub repository, the files that loading needs, fetched into the hub's own cache."""
    if Path(model).is_dir():
        return Path(model)
    if Path(model).is_absolute() or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model):
        raise InvalidInput(f"--model: {model}: there is no such folder, and it is no hub repository (owner/name)")
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.model"]
    try:
        return Path(snapshot_download(model, allow_patterns=wanted, ignore_patterns=["*/*"]))
    except Exception as error:  # not found, gated, no network: the hub's client raises all kinds
        raise InvalidInput(
            f"--model: {model}: there is no such folder, and the hub does not give it ({_said(error)})"
        ) from error


def _context(asked: argparse.Namespace, folder: Path, model: PreTrainedModel) -> torch.Tensor:
    import torch

    window = getattr(model.config, "max_position_embeddings", None)
    if asked.text is None:
        count = DEFAULT_TOKENS if asked.tokens is None else asked.tokens
        generator = torch.Generator().manual_seed(asked.seed)
        ids = torch.randint(0, model.config.vocab_size, (1, count), generator=generator)
    else:
        from .models.loading import load_tokenizer

        try:
            text = asked.text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"--text: {asked.text}: cannot be read as text ({error})") from error
        found = load_tokenizer(folder)(text)["input_ids"]
        if asked.tokens is not None and len(found) < asked.tokens:
            raise InvalidInput(f"--text: {asked.text} has {len(found)} tokens, --tokens asks for {asked.tokens}")
        ids = torch.tensor([found[: asked.tokens]], dtype=torch.long)
        if ids.shape[1] == 0:
            raise InvalidInput(f"--text: {asked.text} holds no text")
    if window is not None and ids.shape[1] > window:
        raise InvalidInput(
            f"{'--text' if asked.text else '--tokens'}: {ids.shape[1]} tokens, the model's window holds {window}; "
            f"give --tokens of at most {window}"
        )
    return ids


def _parser() -> argparse.ArgumentParser:
    from .provenance import VERSION

    parser = argparse.ArgumentParser(prog="contourkv", description="What a KV cache holds, and what it should.")
    parser.add_argument("--version", action="version", version=f"contourkv {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = commands.add_parser(
        "bytes",
        help="bytes that a compressed cache really holds, beside what its ratio promises",
        description="Prefill a model once per press and ratio, and count every storage that its cache owns.",
    )
    asked.add_argument("--model", required=True, metavar="FOLDER|OWNER/NAME", help="model folder or hub repository")
    asked.add_argument(
        "--press", required=True, metavar="NAME[,NAME...]",
        help=f"{OURS}, {FULL}, or presses of kvpress: snapkv, kvzip, adakv_snapkv, ... (a wrong name lists all)",
    )  # fmt: skip
    asked.add_argument("--ratio", required=True, metavar="R[,R...]", help="fraction to remove, at least 0 and under 1")
    asked.add_argument(
        "--tokens", type=_positive, metavar="N",
        help=f"tokens of context: random ids (default {DEFAULT_TOKENS}), or the first N of --text",
    )  # fmt: skip
    asked.add_argument("--text", type=Path, metavar="FILE", help="context to read instead of random ids, UTF-8")
    asked.add_argument("--enforce", action="store_true", help="also show kvpress's selections in a RaggedCache")
    asked.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as the model is stored")
    asked.add_argument("--seed", type=int, default=0, metavar="S", help="of random ids and of presses that draw")
    asked.add_argument("--format", choices=sorted(FORMATS), default="table")
    return parser


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


# ---------------------------------------------------------------------- how it is shown


def _as_table(rows: list[Row]) -> str:
    header = ("press", "ratio", "nominal", "payload", "slack", "metadata", "total", "held/nominal", "held/full")
    lines = [header]
    for row in rows:
        numbers = [f"{count:,}" if count is not None else "-" for count in list(asdict(row).values())[2:7]]
        shares = [f"{share:.3f}" if share is not None else "-" for share in (row.held_over_nominal, row.held_over_full)]
        if row.error:
            shares = ["failed", ""]
        lines.append((row.press, f"{row.ratio:g}", *numbers, *shares))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = (
        "  ".join(cell.ljust(width) if index == 0 else cell.rjust(width) for index, (cell, width) in enumerate(cells))
        for cells in (list(zip(line, widths, strict=True)) for line in lines)
    )
    return "".join(f"{line.rstrip()}\n" for line in shown)


def _as_csv(rows: list[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(Row.__dataclass_fields__), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()


def _as_json(rows: list[Row]) -> str:
    return json.dumps([asdict(row) for row in rows], indent=1) + "\n"


FORMATS: dict[str, Callable[[list[Row]], str]] = {"table": _as_table, "csv": _as_csv, "json": _as_json}


if __name__ == "__main__":
    sys.exit(main())
