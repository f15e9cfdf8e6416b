"""Arguments and options that several commands of ``logra`` have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Config = Annotated[Path, typer.Argument(help="A YAML file, a run's folder, or a shipped recipe such as smollm2-demo.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Dotted keys set over the file's, e.g. control.budget_max=1e-3."),
]
Dtype = Annotated[Literal["float32", "bfloat16"], typer.Option(help="What the engine computes with.")]
EnginePython = Annotated[
    Path, typer.Option(help="The Python of the environment that has vLLM and this project (`make engine`).")
]
ENGINE_PYTHON = Path(".venv-engine/bin/python")
