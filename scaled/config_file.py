"""Reads a run's configuration from YAML and ``key=value``, writes it, and says what is wrong with it, all at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from scaled.config import RunConfig, Section
from scaled.errors import UserError

SHIPPED = Path(str(files("scaled"))) / "configs"


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in a YAML file, a run's folder or a shipped recipe (``smollm2-demo``), ``key=value`` over it.

    Keys of sections are dotted (``control.budget_max=1e-3``), values are YAML (``null``, ``[a, b]``), the last of
    equal keys wins. Raises ``UserError`` with every problem found: its key, the value, what is allowed, and for an
    unknown key the nearest valid one.
    """
    folder, path = path, _find(path)
    data, problems = _read(path)
    if path.parent == folder:  # a run's folder that was moved is the run all the same
        data["run"] = str(folder)
    overridden = set()
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise UserError(f"`{override}` is no override; write key=value, e.g. logra.rank=8")
        if not isinstance(KEYS.get(key), str):
            problems.append(f"{key} (command line): {_unknown(key)}")
            continue
        section, _, leaf = key.rpartition(".")
        holder = data.setdefault(section, {}) if section else data
        if isinstance(holder, dict):  # if not, the file is wrong there and pydantic says so
            holder[leaf] = _parse(text, f"the value of `{override}`")[0]
            overridden.add(key)
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        problems += [line for details in error.errors() for line in _explain(details, overridden)]
    if problems:
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise UserError("\n  ".join([f"{path} has {count}:", *problems]))
    return config


def dump_config(config: RunConfig) -> str:
    """The whole configuration as YAML, defaults included; ``load_config`` of it gives an equal one."""
    # In ASCII: unescaped, PyYAML would lose line breaks such as U+0085 from a stop string.
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def settings_of(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each setting of a dumped configuration by its dotted key."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from settings_of(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _keys(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield prefix + name, field.annotation
            yield from _keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field.description


KEYS = dict(_keys(RunConfig))
"""Each dotted key and its explanation; each section's name and its class."""


def _find(path: Path) -> Path:
    for file in (path, path / "config.yaml"):
        if file.exists() and not file.is_dir():  # a pipe is as good as a file: logra train <(…)
            if file.name == "config.yaml" and not file.is_file():  # of a run, which is read again and again
                raise UserError(f"{file} is no ordinary file, and should be the configuration of the run; move it away")
            return file
    shipped = sorted(recipe.stem for recipe in SHIPPED.glob("*.yaml"))
    if path.parent == Path() and path.name.removesuffix(".yaml") in shipped:
        return SHIPPED / f"{path.name.removesuffix('.yaml')}.yaml"
    beside = {file.stem: str(file) for file in path.parent.glob("*.y*ml")} | {name: name for name in shipped}
    near = [beside[stem] for stem in difflib.get_close_matches(path.stem, beside)]
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    what = "no configuration (config.yaml) in the folder" if path.is_dir() else "no configuration file"
    raise UserError(f"there is {what} {path}.{meant} Shipped recipes: {', '.join(shipped)}.")


class _Loader(yaml.SafeLoader):
    """Plain YAML that also notes the keys given twice, of which YAML would keep the last without a word."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.twice: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                self.twice.append(f"{name}: given twice, in lines {lines[name]} and {line}")
            lines[name] = line
        return super().construct_mapping(node, deep)


def _read(path: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    data, twice = _parse(text, str(path))
    if not isinstance(data, dict):
        found = "empty" if data is None else f"a {type(data).__name__}"
        raise UserError(f"{path} is {found}; a configuration is a mapping of keys, such as `updates: 14`")
    return data, twice


def _parse(text: str, where: str) -> tuple[Any, list[str]]:
    """A YAML document, and what is said about its keys given twice."""
    try:
        loader = _Loader(text)
        loader.name = where
        return loader.get_single_data(), loader.twice
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that does not exist
        raise UserError(f"{where} is no valid YAML: {error}") from None


def _explain(details: ErrorDetails, overridden: set[str]) -> Iterator[str]:
    """What one of pydantic's errors means to the writer of the file."""
    known = [part for part in details["loc"] if isinstance(part, str)]
    key, value = ".".join(known), details["input"]
    source = " (command line)" if key in overridden else ""
    about = KEYS.get(key)
    if details["type"] in ("extra_forbidden", "invalid_key"):
        for unknown in _leaves(str(details["loc"][-1]) if not known else key, value):
            yield f"{unknown}{source}: {_unknown(unknown)}"
    elif details["type"] == "missing":
        yield f"{key}: is missing. {about}"
    elif details["type"] == "value_error":
        shown = "" if isinstance(value, dict) else f" = {_show(value)}"
        yield f"{key}{shown}{source}: {details['ctx']['error']}".removeprefix(": ")
    elif isinstance(value, dict) and value:  # a section's keys under a key that is none: `reward: {failure_reward: 0}`
        for unknown in _leaves(key, value):
            yield f"{unknown}{source}: {_unknown(unknown)}"
    elif isinstance(about, type):
        yield f"{key} = {_show(value)}: must be a section, with keys such as `{next(iter(about.model_fields))}: …`"
    else:
        wanted = details["msg"].replace("Input should be", "must be").replace("a valid tuple", "a list")
        yield f"{key} = {_show(value)}{source}: {wanted}. {about}"


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def _leaves(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key


def _unknown(key: str) -> str:
    """No such key, and the keys nearest to it, whether by all of the name or by its last part."""
    if isinstance(KEYS.get(key), type):
        return f"is a section; set one of its keys, e.g. {key}.{next(iter(KEYS[key].model_fields))}"
    score = {
        known: max(_likeness(key, known), _likeness(*(name.rpartition(".")[2] for name in (key, known))))
        for known in KEYS
    }
    nearest = [known for known in KEYS if score[known] == max(score.values())]
    return f"no such key; did you mean {' or '.join(nearest[:3])}?"


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()
