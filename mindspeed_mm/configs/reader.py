"""Configuration files as they are written: attribute-style objects, `args.mm.model`, `args.mm.data`, `args.mm.tool`."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from pathlib import Path
from typing import Any

from mindspeed_mm.configs.files import JSON_SUFFIXES, YAML_SUFFIXES, FileSection, read_json, read_yaml
from mindspeed_mm.configs.scalars import show
from mindspeed_mm.utils.errors import ConfigError, did_you_mean


class ConfigReader:
    """A mapping whose keys are attributes too, at every depth (in lists as well).

    Values stay as they are in the file: `to_dict()` returns exactly the mapping that was given. Attributes may be set;
    a mapping that is set becomes a ConfigReader like the others.

    Args:
        config: the mapping; None means an empty one.
        file: the file it came from, for messages.
        path: the dotted path of this part inside the file, for messages.
    """

    __slots__ = ("__weakref__", "_data", "_file", "_is_frozen", "_path")

    def __init__(self, config: Mapping[str, Any] | None = None, *, file: str | None = None, path: str = "") -> None:
        object.__setattr__(self, "_file", file)
        object.__setattr__(self, "_path", path)
        object.__setattr__(self, "_data", {})
        object.__setattr__(self, "_is_frozen", False)
        if isinstance(config, ConfigReader):
            config = config.to_dict()
        if config is not None and not isinstance(config, Mapping):
            raise ConfigError(f"{self._where()}: found {show(config)}, expected an object")
        for key, value in (config or {}).items():
            self._data[key] = self._wrap(key, value)

    def _wrap(self, key: str, value: object) -> object:
        path = f"{self._path}.{key}" if self._path else str(key)
        if isinstance(value, Mapping):
            return ConfigReader(value, file=self._file, path=path)
        if isinstance(value, list):
            return [self._wrap(f"{key}[{index}]", item) for index, item in enumerate(value)]
        return value

    def _where(self) -> str:
        return ": ".join(part for part in (self._file or "configuration", self._path) if part)

    @property
    def config_file(self) -> str | None:
        """The file this came from, or None."""
        return self._file

    def __getattr__(self, name: str) -> Any:
        # Private and dunder names are never keys: copy, pickle and inspect probe for them on half-built objects.
        if name.startswith("_"):
            raise AttributeError(name)
        data = self._data
        if name in data:
            return data[name]
        path = f"{self._path}.{name}" if self._path else name
        near = did_you_mean(name, map(str, data))
        raise AttributeError(f"{self._file or 'configuration'}: no key '{path}'{near}")

    def _refuse_write(self, key: str) -> None:
        if self._is_frozen:
            raise ConfigError(
                f"{self._where()}: '{key}' can't be written: the run has been described by this file already; change "
                "the file, or write to a copy (copy.deepcopy) that your own model is built from"
            )

    def __setattr__(self, name: str, value: object) -> None:
        self._refuse_write(name)
        self._data[name] = self._wrap(name, value)

    def __delattr__(self, name: str) -> None:
        self._refuse_write(name)
        if name not in self._data:
            raise AttributeError(name)
        del self._data[name]

    def __getitem__(self, key: str) -> Any:
        if key not in self._data:
            raise KeyError(key)
        return self._data[key]

    def __setitem__(self, key: str, value: object) -> None:
        self._refuse_write(key)
        self._data[key] = self._wrap(key, value)

    def __contains__(self, key: object) -> bool:
        return key in self._data

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ConfigReader):
            return self._data == other._data
        if isinstance(other, Mapping):
            return self.to_dict() == dict(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # mutable, like dict

    def __repr__(self) -> str:
        place = f" from {self._where()}" if self._file else ""
        return f"<ConfigReader{place}: {self.to_dict()!r}>"

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *map(str, self._data)]

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self.to_dict(), "file": self._file, "path": self._path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ConfigReader.__init__(self, state["data"], file=state["file"], path=state["path"])

    def keys(self) -> KeysView[str]:
        """The keys at this level."""
        return self._data.keys()

    def values(self) -> ValuesView[Any]:
        """The values at this level; nested mappings are ConfigReaders."""
        return self._data.values()

    def items(self) -> ItemsView[str, Any]:
        """The (key, value) pairs at this level."""
        return self._data.items()

    def get(self, key: str, default: object = None) -> Any:
        """Return the value of `key`, or `default` if there is none."""
        return self._data.get(key, default)

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts and lists, equal to the content of the file."""
        return {key: _unwrap(value) for key, value in self._data.items()}

    def update_unuse(self, **kwargs: Any) -> dict[str, Any]:
        """Set those of `kwargs` whose key exists already; return the others."""
        unused = {}
        for key, value in kwargs.items():
            if key in self._data:
                self[key] = value
            else:
                unused[key] = value
        return unused


def freeze_reader(reader: ConfigReader) -> None:
    """Refuse writes to a file's content from here on, at every depth; a copy may be written.

    A function, not a method: any name may be a key of a file.
    """
    object.__setattr__(reader, "_is_frozen", True)
    for value in reader._data.values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ConfigReader):
                freeze_reader(item)


def _unwrap(value: object) -> object:
    if isinstance(value, ConfigReader):
        return value.to_dict()
    if isinstance(value, list):
        return [_unwrap(item) for item in value]
    return value


class MMConfig:
    """The configuration files of a run, each as an attribute.

    A `.json` file is taken whole; a `.yaml` file is indexed by the name, so that one file may have `model:`, `data:`
    and `tool:`. A name without a path (None or "") gets no attribute.

    Args:
        files: name → path, e.g. `{"model": "model.json", "data": "data.json", "tool": "tools.json"}`.

    Attributes:
        model, data, tool: the files of these names, where they were given.

    Raises:
        ConfigError: the faults of all files together.
    """

    model: ConfigReader
    data: ConfigReader
    tool: ConfigReader

    def __init__(self, files: Mapping[str, str | Path | None]) -> None:
        problems = []
        for name, path in files.items():
            if not path:
                continue
            try:
                setattr(self, name, read_config_file(name, path))
            except ConfigError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError("\n".join(problems))

    def __repr__(self) -> str:
        return f"MMConfig({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


def read_config_file(name: str, path: str | Path) -> ConfigReader:
    """Read a JSON file whole, or of a YAML file the top-level key `name`.

    Raises:
        ConfigError: it can't be read, lacks the key, or is no object.
    """
    if isinstance(path, FileSection):
        return ConfigReader(path.content, file=path.label)
    path = str(path)
    suffix = Path(path).suffix.lower()
    if suffix in JSON_SUFFIXES:
        content = read_json(path)
    elif suffix in YAML_SUFFIXES:
        whole = read_yaml(path)
        if not isinstance(whole, Mapping) or name not in whole:
            found = ", ".join(whole) if isinstance(whole, Mapping) else show(whole)
            raise ConfigError(f"{path}: no top-level key '{name}'; found {found}")
        content = whole[name]
    else:
        raise ConfigError(f"{path}: expected a name that ends in .json or .yaml")
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: found {show(content)}, expected an object")
    return ConfigReader(content, file=path)
