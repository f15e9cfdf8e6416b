"""What the benches count, against counts by hand, and the laws that they fit, against laws that are known."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from typer.testing import CliRunner

from scaled.bench import growth
from scaled.bench.costs import beside, measured, together
from scaled.bench.probe_cost import probed, share
from scaled.cli import app
from scaled.config_file import load_config

CPU = torch.device("cpu")
FP32 = 4


def count(work):
    (found,) = measured({"it": work}, 1, CPU).values()
    return found["operations"], found["bytes"]


def test_a_product_takes_two_operations_a_pair_and_moves_its_three_matrices():
    x, y = torch.ones(3, 5), torch.ones(5, 7)
    assert count(lambda: x @ y) == (2 * 3 * 5 * 7, FP32 * (3 * 5 + 5 * 7 + 3 * 7))


def test_views_and_empty_memory_move_nothing_and_a_lookup_reads_only_what_it_finds():
    table, x, ids = torch.ones(1000, 4), torch.ones(6, 6), torch.tensor([3, 3, 9])
    assert count(lambda: (x.T.reshape(36)[:4], torch.empty(9, 9))[0]) == (0, 2 * FP32 * 36)  # the reshape copies
    assert count(lambda: x[1:].view(-1)) == (0, 0)
    assert count(lambda: torch.empty(50)) == (0, 0)
    assert count(lambda: F.embedding(ids, table)) == (0, 2 * FP32 * 3 * 4 + 8 * 3)
    assert count(lambda: x.add_(1)) == (0, 2 * FP32 * 36)
    assert count(lambda: x.zero_()) == (0, FP32 * 36)
    assert count(lambda: x + torch.ones(1, 6).expand(6, 6)) == (
        0,
        FP32 * (6 + 6 + 36 + 36),
    )  # ones, read, read, written


def test_attention_on_a_cpu_is_counted_where_torch_counts_none():
    """Scores and mixture forward; backward makes the scores again, and four gradients."""
    b, h, n, m, width = 2, 3, 5, 8, 4
    query, key, value = (torch.ones(b, h, length, width, requires_grad=True) for length in (n, m, m))
    one = 2 * b * h * n * m * width
    assert count(lambda: F.scaled_dot_product_attention(query, key, value))[0] == 2 * one
    both = count(lambda: F.scaled_dot_product_attention(query, key, value).sum().backward())[0]
    assert both == 2 * one + 5 * one


def test_ratios_of_seconds_are_taken_in_each_round_and_parts_add_up_in_each_round():
    slow = {"operations": 30, "bytes": 8, "seconds": [3.0, 30.0, 6.0]}
    fast = {"operations": 10, "bytes": 16, "seconds": [1.0, 10.0, 3.0]}
    rows = beside({"slow": slow, "fast": fast, "both": together([slow, fast])}, "fast")
    assert rows["slow"]["ratio"] == 3 and rows["slow"]["spread_of_ratio"] == [2, 3]
    assert rows["slow"]["bound_by_operations"] == 3 and rows["slow"]["bound_by_bytes"] == 0.5
    assert rows["both"]["seconds"] == 9 and rows["both"]["ratio"] == 4 and rows["both"]["operations"] == 40


def test_a_fitted_line_has_the_slope_and_the_exponent_that_made_it():
    line = growth.fit([1, 2, 4, 8], [7, 10, 16, 28])
    assert line["slope"] == pytest.approx(3) and line["intercept"] == pytest.approx(4)
    assert line["explained"] == pytest.approx(1)
    assert growth.fit([1, 2, 4], [5, 20, 80])["exponent"] == pytest.approx(2)
    assert growth.fit([1, 2, 4], [5, 20, 80])["explained"] < 0.99  # a square is no line
    assert growth.fit([1, 2], [5, 5]) == {"slope": 0, "intercept": 5, "explained": 1, "exponent": 0}


def made_up_growth():
    """Figures as ``bench step`` has them, of seconds = 1 + tokens / 100, and 2 MiB a rank above frozen."""

    def figures(tokens, ranks):
        names = ["frozen", "dense", *(f"{method}:{rank}" for method in ("logra", "lora") for rank in ranks)]
        extra = {name: 2 * int(name.partition(":")[2] or 0) for name in names}
        return {
            "tokens": tokens,
            "seconds": dict.fromkeys(names, 1 + tokens / 100),
            "peak_bytes": {name: (500 + tokens + extra[name]) * 2**20 for name in names},
            "weight_bytes": dict.fromkeys(names, 100 * 2**20),
            "operations": {name: 1e9 * (tokens + 3 * extra[name]) for name in names},
            "ratio_to_dense": dict.fromkeys(names, 1.0),
            "bound": dict.fromkeys(names, 1.0),
        }

    found = {
        "tokens": {n: figures(2 * n, [16]) for n in (8, 16, 32)},
        "rank": figures(64, [8, 16]),
        "width": {64: figures(64, [16]), 128: figures(64, [16])},
        "models": ["small", "large"],
        "ranks": [8, 16],
    }
    return found | {"slopes": growth.slopes(found)}


def test_growth_is_told_in_tokens_and_in_rank():
    slopes = made_up_growth()["slopes"]
    assert slopes["tokens"]["logra:16, ms a token"]["slope"] == pytest.approx(10)
    assert slopes["tokens"]["dense, MiB above the weights a token"]["slope"] == pytest.approx(1)
    assert slopes["tokens"]["dense, MiB above the weights a token"]["intercept"] == pytest.approx(400)
    assert slopes["rank"]["logra, MiB above frozen a rank"]["slope"] == pytest.approx(2)
    assert slopes["rank"]["logra, MiB above frozen a rank"]["intercept"] == pytest.approx(0)
    assert slopes["rank"]["lora, 1e9 operations a rank"]["slope"] == pytest.approx(6)


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_the_plots_of_growth_are_a_picture_of_the_kind_that_the_name_asks_for(tmp_path, kind):
    file = tmp_path / f"growth.{kind}"
    growth.draw(made_up_growth(), file)
    assert file.read_bytes().startswith({"svg": b"<?xml", "png": b"\x89PNG"}[kind])


def test_the_probes_share_of_an_update_by_hand():
    """The paper's recipe: 8 of 128 responses; at 2 passes a response 16 passes beside 3 · 128."""
    config = load_config(Path("qwen2.5-math-1.5b"))
    chosen, batch = probed(config)
    assert share(config, 2.0) == pytest.approx(2 * chosen / (2 * chosen + 3 * batch))
    assert (chosen, batch) == (8, 128)


def test_a_real_probe_is_measured_and_both_predictions_agree(tiny_model, tmp_path):
    file = tmp_path / "probe.json"
    settings = [f"model.path={tiny_model}", "rollout.prompts=2", "rollout.responses_per_prompt=2"]
    settings += ["rollout.max_new_tokens=16", "threads=1"]
    options = ["--prompt-tokens", "8", "--repeats", "1", "--json", str(file)]
    done = CliRunner().invoke(app, ["bench", "probe", "tiny-math", *settings, *options])
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    predicted = found["predicted_kl"]
    assert predicted["jvp"] == pytest.approx(predicted["finite difference"], rel=0.02)
    operations = {name: row["operations"] for name, row in found["rows"].items()}
    assert operations["jvp"] > operations["forward"] > 0
    assert operations["jvp and realised KL"] == operations["jvp"] + operations["realised KL"]
    assert "qwen2.5-math-7b: 8 of 128 responses are probed" in done.output


def test_drawing_projections_is_measured_beside_torchs_generator(tiny_model, tmp_path):
    file = tmp_path / "refresh.json"
    arguments = ["bench", "refresh", str(tiny_model), "--rank", "4", "--tokens", "16", "--repeats", "1"]
    done = CliRunner().invoke(app, [*arguments, "--json", str(file)])
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    assert found["share"] > 0 and found["matrices"] == 14
    assert set(found["projected"]["576"]) == {"rademacher", "gaussian", "hadamard", "orthonormal"}
    assert set(found["projected"]["18944"]) == {"rademacher", "gaussian", "hadamard"}
    assert found["lifted"]["576"]["gaussian"]["operations"] == 2 * 256 * 4 * 576
    drawn = found["drawn"]["576"]
    assert drawn["counter, packed bits"]["bytes"] < drawn["counter, signs in fp32"]["bytes"]


def test_ranks_sum_as_many_bytes_as_the_formula_says(tiny_model, tmp_path):
    file = tmp_path / "reduction.json"
    arguments = ["bench", "reduction", str(tiny_model), "--rank", "4", "--tokens", "16", "--repeats", "1"]
    done = CliRunner().invoke(app, [*arguments, "--json", str(file)])
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    with safe_open(tiny_model / "model.safetensors", "pt") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in weights.keys() if "_proj." in name]  # noqa: SIM118
    assert found["formula"] == {
        "logra": FP32 * 4 * sum(d for d, _ in shapes),
        "dense": FP32 * sum(d * k for d, k in shapes),
    }
    for method, bytes_by_formula in found["formula"].items():  # and some numbers: tokens, the loss
        assert 0 <= found["measured"][method]["bytes"]["summed"] - bytes_by_formula <= 64
    gathered = [one["bytes"]["gathered"] for one in found["measured"].values()]
    assert gathered[0] == pytest.approx(gathered[1], rel=0.01)


@pytest.mark.parametrize("command", ["step", "probe", "refresh", "reduction", "growth"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(command, tmp_path):
    arguments = ["bench", command, *(["tiny-math"] if command == "probe" else []), "--json"]
    for place in (tmp_path, tmp_path / "nowhere" / "x.json"):
        done = CliRunner().invoke(app, [*arguments, str(place)])
        said = re.sub(r"[\s│]+", " ", done.output)  # a long path breaks the lines of the box anywhere
        assert done.exit_code == 2 and "cannot be written" in said


def test_a_model_that_cannot_be_read_is_one_clear_error_of_the_ranks_too(tmp_path):
    done = CliRunner().invoke(app, ["bench", "reduction", str(tmp_path / "none")])
    assert done.exit_code != 0 and "there is no model folder" in str(done.exception)
    assert "elastic" not in str(done.exception)
