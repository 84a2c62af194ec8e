"""JSON and YAML files as plain data: nothing in them runs, and none takes more than a file of its size may.

Both formats let a small file ask for much: nesting deeper than Python's stack, aliases of aliases that unfold to
billions of values, a key twice of which the last counts. What is read here has none of that.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from .errors import said

MOST_NESTED = 64
MOST_YAML_BYTES = 1 << 20
# after aliases are unfolded
MOST_YAML_VALUES = 100_000


class NotPlain(ValueError):
    """The text is not plain data; the message is one line on what it is instead. The caller names the file."""


def read_json(path: str | os.PathLike) -> object:
    """The value in a JSON file; see `parse_json`. An `OSError` where it cannot be read."""
    return parse_json(Path(path).read_bytes())


def parse_json(raw: str | bytes) -> object:
    """The value of a JSON text, UTF-8 where it is bytes.

    Raises
    ------
    NotPlain
        It is not JSON, truncated, not UTF-8, nested deeper than `MOST_NESTED`, says a key twice, or holds no text.
    """
    try:
        text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
        value = json.loads(text, object_pairs_hook=_once)
    except NotPlain:
        raise
    except RecursionError:
        raise NotPlain(f"it is nested deeper than {MOST_NESTED} levels") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, a number of thousands of digits
        raise NotPlain(said(error)) from error
    check_nesting(value)
    if "\\ud" in text.lower():
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise NotPlain("it holds half of a surrogate pair, which is no text") from None
    return value


def read_yaml(path: str | os.PathLike) -> object:
    """The value in a YAML file, of YAML's own types alone.

    Raises
    ------
    NotPlain
        It is not YAML or not UTF-8, larger than `MOST_YAML_BYTES`, nested deeper than `MOST_NESTED`, unfolds to more
        than `MOST_YAML_VALUES`, says a key twice, refers to itself, or names a type that only code could make.
    OSError
        It cannot be read.
    """
    import yaml

    size = os.path.getsize(path)
    if size > MOST_YAML_BYTES:
        raise NotPlain(f"it has {size} bytes, at most {MOST_YAML_BYTES} are read")
    raw = Path(path).read_bytes()
    try:
        return yaml.load(raw.decode("utf-8"), _plain_loader())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"line {mark.line + 1}: " if mark else ""
        raise NotPlain(at + said(error.problem or error.context or "not YAML")) from error
    except yaml.YAMLError as error:
        raise NotPlain(said(error)) from error
    except NotPlain:
        raise
    except Exception as error:  # not UTF-8; a date that is none; PyYAML trips over a tag on a text of another type
        raise NotPlain(said(error)) from error


def check_nesting(value: object, most: float = float("inf")) -> None:
    """Stop on lists and mappings more than `MOST_NESTED` deep, or on more than `most` values in them."""
    level, depth, count = [value], 0, 0
    while level:
        inner = [part for part in level if isinstance(part, (dict, list))]
        level = [each for part in inner for each in (part.values() if isinstance(part, dict) else part)]
        depth += bool(inner)
        count += len(level)
        if count > most:
            raise NotPlain(f"it unfolds to more than {most} values")
        if depth > MOST_NESTED:
            raise NotPlain(f"it is nested deeper than {MOST_NESTED} levels")


def _once(pairs: list[tuple[str, object]]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise NotPlain(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands there twice")
    return found


def _plain_loader() -> type:
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML's safe loader, with its sizes counted while the file is read and no key twice."""

        def __init__(self, stream: str) -> None:
            super().__init__(stream)
            self.depth, self.values, self.sizes, self.merged = 0, 0, {}, set()

        def compose_node(self, parent: object, index: object) -> yaml.Node:
            mark = self.peek_event().start_mark
            alias = self.check_event(yaml.AliasEvent)
            before = self.values
            self.depth += 1
            if self.depth > MOST_NESTED:
                raise NotPlain(f"line {mark.line + 1}: it is nested deeper than {MOST_NESTED} levels")
            node = super().compose_node(parent, index)
            self.depth -= 1
            if alias and id(node) not in self.sizes:
                raise NotPlain(f"line {mark.line + 1}: a value that holds itself")
            self.values += self.sizes[id(node)] if alias else 1
            if self.values > MOST_YAML_VALUES:
                raise NotPlain(f"line {mark.line + 1}: its aliases unfold to more than {MOST_YAML_VALUES} values")
            self.sizes.setdefault(id(node), self.values - before)
            return node

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            # once, before a merge key (<<) brings in pairs that the mapping's own replace
            if node in self.merged:
                return
            self.merged.add(node)
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                    name = self.construct_object(key)
                    if name in seen:
                        raise NotPlain(f"line {key.start_mark.line + 1}: the key {name!r} stands there twice")
                    seen.add(name)
            super().flatten_mapping(node)

    return Loader
