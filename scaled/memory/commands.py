"""The command ``logra plan``."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from scaled.options import Config, Overrides


def plan(
    config: Config,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    card_gib: Annotated[float, typer.Option(min=0.001, help="Memory of a GPU, in GiB.")] = 80.0,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt; the rest is response.")] = 128,
) -> None:
    """Show how much memory training takes on each GPU, by phase and by item, and whether it fits.

    No GPU and no weights are needed: one update is traced on the model's shapes, every sequence at full length.

    model.path may be a folder with a config.json alone, or a shipped architecture: qwen2.5-math-1.5b,
    qwen2.5-math-7b, 27b-stand-in.

    The exit code is 1 if it does not fit; then the cheapest settings that would make it are shown.
    """
    from scaled.config_file import load_config
    from scaled.memory import plan as planning
    from scaled.memory.show import show

    settings = load_config(config, overrides or [])
    found = planning.plan_memory(settings, prompt=prompt_tokens)
    card, changes = card_gib * planning.GIB, []
    if not found.fits(card):
        changes = planning.cheapest_changes(settings, found, card, prompt=prompt_tokens)
    if as_json:
        print(json.dumps(planning.as_json(found, card_gib, changes), indent=1))
    else:
        show(found, card_gib, changes, settings, Console(highlight=False))
    raise typer.Exit(0 if found.fits(card) else 1)
