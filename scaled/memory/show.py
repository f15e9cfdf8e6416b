"""A memory plan as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from scaled.config import RunConfig
from scaled.memory.plan import GIB, RESERVED, Change, Plan

SHOWN = 0.005 * GIB  # smaller items are not


def show(plan: Plan, card_gib: float, changes: list[Change], config: RunConfig, console: Console) -> None:
    """Print a column a phase and a row an item, then whether it fits, and what would help."""
    items = sorted({item for phase in plan.phases.values() for item, size in phase.items() if size >= SHOWN})
    title = f"GiB on each of {config.launch.ranks} GPUs at the highest moment of each phase"
    table = Table("item", title=title)
    for phase in plan.phases:
        table.add_column(phase, justify="right")
    for item in items:
        sizes = [phase.get(item, 0) for phase in plan.phases.values()]
        table.add_row(item, *(f"{size / GIB:.2f}" if size >= SHOWN else "" for size in sizes))
    table.add_section()
    table.add_row("in all", *(f"{sum(phase.values()) / GIB:.2f}" for phase in plan.phases.values()))
    console.print(table)
    usable = card_gib * (1 - RESERVED)
    verdict = "fits" if plan.fits(card_gib * GIB) else "does not fit"
    console.print(
        f"peak {plan.peak / GIB:.2f} GiB ({plan.highest}): {verdict} on a card of {card_gib:g} GiB, of which "
        f"{usable:.1f} are for tensors"
    )
    for number, change in enumerate(changes):
        after = f"{change.peak / GIB:.2f} GiB"
        console.print(f"  {'and ' if number else 'set '}{change.override}: {after}; costs {change.costs}")
    if not plan.fits(card_gib * GIB) and (not changes or changes[-1].peak > usable * GIB):
        console.print("  and none of the settings known to the planner makes it fit")
