"""The architecture of a model that is planned for: from its folder, or one of those that are shipped."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from scaled.errors import UserError
from scaled.model import require_name, resolve_model
from scaled.smollm2 import SMOLLM2, loading, quiet, smollm2_folder
from scaled.tiny_model import TINY, make_tiny

SHIPPED = Path(str(files("scaled"))) / "memory" / "architectures"


def shipped() -> list[str]:
    """The architectures that need no folder."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def architecture(name: str) -> PreTrainedConfig:
    """What transformers builds the model from: a local folder's config.json, a shipped architecture, or ``tiny``.

    ``Qwen/Qwen2.5-Math-1.5B`` is the shipped ``qwen2.5-math-1.5b``; the hub is not asked. Raises ``UserError`` for a
    name that is neither.
    """
    require_name(name)
    folder = smollm2_folder() if name == SMOLLM2 else Path(name).expanduser()
    if folder.is_dir():
        source = resolve_model(str(folder))
        with quiet(), loading(name):
            return AutoConfig.from_pretrained(source, trust_remote_code=False)
    if name == TINY:
        return make_tiny()[0].config
    path = SHIPPED / f"{Path(name).name.lower()}.json"
    if not path.is_file():
        raise UserError(
            f"model {name} is no folder here, and its shapes are not shipped; give a folder with its config.json (no "
            f"weights are needed), or one of {', '.join(shipped())}"
        )
    settings = json.loads(path.read_text(encoding="utf-8"))
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def with_layers(settings: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """The same architecture with so many of its layers."""
    changed = settings.to_dict() | {"num_hidden_layers": layers}
    if changed.get("layer_types"):
        changed["layer_types"] = changed["layer_types"][:layers]
    changed.pop("model_type")
    return type(settings)(**changed)


def alike(settings: PreTrainedConfig) -> bool:
    """Whether every layer is like every other."""
    return len(set(getattr(settings, "layer_types", None) or [])) <= 1
