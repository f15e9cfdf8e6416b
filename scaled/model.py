"""Pretrained models: the one that is fetched for the demo, and any other of Hugging Face's format."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from scaled.config_data import ModelConfig
from scaled.errors import UserError
from scaled.smollm2 import SMOLLM2, fetch_smollm2, loading, new_folder, quiet, smollm2_folder
from scaled.tiny_model import TINY, make_tiny

FLOATS = ("F64", "F32", "BF16", "F16")
SOME_TEXT = "What is 7 + 5?"
SAME_LOGITS = 1e-5  # of the largest logit: both ways make the same products, so they differ by rounding at most


def fetch_model(name: str, folder: Path) -> Path:
    """Save a model as fp32 in a folder of its own: ``smollm2``, ``tiny`` (made anew), a name on the hub, or another
    folder."""
    require_name(name)
    if name == SMOLLM2:
        return fetch_smollm2(folder)
    with new_folder(folder) as build:
        model, tokenizer = make_tiny() if name == TINY else load_model(ModelConfig(path=name, device="cpu"))
        try:
            with quiet():
                model.save_pretrained(build)
                tokenizer.save_pretrained(build)
        except Exception as error:  # a full disk has a class of its own in safetensors
            raise UserError(f"model {name} could not be saved in {folder}: {error}; make room there") from error
    return folder


def require_name(name: str) -> None:
    """Raises ``UserError`` for a name that is empty: as a path it would be the current folder."""
    if not name.strip():
        raise UserError(
            f"the model's name is empty; give a folder in Hugging Face format, a name on the hub, or {SMOLLM2}"
        )


def resolve_model(name: str) -> str:
    """What transformers can load: a local folder (``smollm2`` is fetched if it is missing) or a name on the hub."""
    require_name(name)
    if name == SMOLLM2:
        return str(fetch_smollm2(smollm2_folder()))
    path = Path(os.path.expanduser(name))  # Path's own raises for an unknown user
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
    with quiet(), loading(config.path):
        _refuse_quantised(AutoConfig.from_pretrained(source, trust_remote_code=False), config.path)
        _refuse_integers(source, config.path)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    _check_tokenizer(tokenizer, config.path)
    with quiet(), loading(config.path):
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
    _fit_tokens(tokenizer, model, config.path)
    _check_output_layer(model, config.path)
    return model, tokenizer


def load_skeleton(config: ModelConfig, *, fetch: bool = True) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model without its weights, on the meta device, for the shapes, and its tokenizer. Raises as ``load_model``
    does, but for what only the weights show; without ``fetch`` also for a model on the hub that is not here yet."""
    source = resolve_model(config.path)
    with quiet(), loading(config.path):
        settings = AutoConfig.from_pretrained(source, trust_remote_code=False, local_files_only=not fetch)
        _refuse_quantised(settings, config.path)
        _refuse_integers(source, config.path)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=not fetch)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
        with suppress(OSError):  # a folder without one; some name more ends of a response than config.json
            model.generation_config = GenerationConfig.from_pretrained(source, local_files_only=not fetch)
    _check_tokenizer(tokenizer, config.path)
    _fit_tokens(tokenizer, model, config.path)
    return model, tokenizer


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
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:  # torchrun: a GPU each
        name = f"cuda:{os.environ['LOCAL_RANK']}"
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


def _refuse_integers(source: str, name: str) -> None:
    """Weights of a type that transformers would widen without their scales."""
    for path in sorted(Path(source).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 — no mapping
                if (dtype := file.get_slice(key).get_dtype()) not in FLOATS:
                    raise UserError(
                        f"model {name} has {key} as {dtype}, not one of {', '.join(FLOATS)}; give its unquantised "
                        "original"
                    )


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {name} has no chat template; take the model's instruct variant, or save one: "
            "set tokenizer.chat_template and call tokenizer.save_pretrained on a copy of the folder"
        )
    if not tokenizer(SOME_TEXT, add_special_tokens=False)["input_ids"]:
        raise UserError(
            f"the tokenizer of {name} makes no tokens of {SOME_TEXT!r}: its vocabulary is missing; put the model's "
            "tokenizer.json into the folder"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"the tokenizer of {name} has no end of turn; set tokenizer.eos_token and save it in the folder"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token


def _fit_tokens(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, name: str) -> None:
    rows = model.get_input_embeddings().num_embeddings
    if tokenizer.eos_token_id >= rows:
        raise UserError(
            f"the tokenizer of {name} ends a turn by {tokenizer.eos_token!r}, number {tokenizer.eos_token_id}, "
            f"and the model knows {rows} tokens; set eos_token to one that the model was trained with"
        )
    if tokenizer.pad_token_id >= rows:
        tokenizer.pad_token = tokenizer.eos_token


@torch.no_grad()
def _check_output_layer(model: PreTrainedModel, name: str) -> None:
    head, inner = model.get_output_embeddings(), model.base_model
    ids = torch.arange(8, device=model.device)[None]
    logits = model(ids, use_cache=False).logits
    if not torch.isfinite(logits).all():
        raise UserError(f"model {name} gives logits that are not finite: its weights are damaged; take another copy")
    if head is not None and inner is not model:
        difference = (head(inner(ids, use_cache=False).last_hidden_state) - logits).abs().max()
        if difference <= SAME_LOGITS * logits.abs().max():
            return
    raise UserError(
        f"{type(model).__name__} ({name}) does not take its logits straight from its output layer (it may cap or scale "
        "them), and they could not be computed at response positions only; choose another architecture"
    )
