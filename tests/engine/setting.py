"""Where the environment of engines is."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-engine/bin/python"
