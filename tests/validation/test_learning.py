"""The learning runs: what the ledger's own figures do not show."""

import itertools

import numpy as np
import pytest
import torch

from logra_ref.toy import LargerNumber, ToyPolicy, accuracy
from validation import experiments
from validation.claim import Setting
from validation.experiments import Log, Run, train
from validation.outcomes import averaged, end, interval, kl_ratio, retained, slope


def test_the_larger_number_is_right_and_every_other_answer_wrong():
    task = LargerNumber(4)
    for a, b, answer in itertools.product(range(4), range(4), range(5)):
        assert task.rewards(torch.tensor([[a, b, 4]]), torch.tensor([answer])).item() == float(answer == max(a, b))


@torch.no_grad()
def test_accuracy_follows_the_task():
    policy, task = ToyPolicy(5, width=8, layers=1, heads=2), LargerNumber(4)
    right = [float(torch.softmax(policy(p[None])[0, -1], 0)[max(p[:2].tolist())]) for p in task.all_prompts()]
    assert accuracy(policy, task) == pytest.approx(np.mean(right), rel=1e-5)


@pytest.mark.parametrize("method", ["logra", "adam", "lora"])
def test_a_run_depends_on_its_settings_alone(method):
    """Neither on the global generator nor on the number of threads."""
    run = Run(method=method, updates=10, rank=4, learning_rate=1e-2)
    torch.manual_seed(1)
    first = train(run)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(2)
    second = train(run)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    np.testing.assert_equal(vars(first), vars(second))
    assert len(first.accuracy) == 2 and len(first.realised) == 10
    assert first.accuracy[0] != first.accuracy[1]


def test_ends_and_best_stretches_are_of_the_last_and_the_best_updates():
    log = Log(accuracy=[0.0, 0.2, 0.8, 0.6, 0.4])  # before the first update, then after 10, 20, 30, 40
    assert end(log, 20) == pytest.approx(0.5)
    assert retained(log, 20) == pytest.approx(0.5 / 0.7)
    assert retained(log, 10) == pytest.approx(0.5)


def test_a_run_with_a_batch_without_signal_has_an_update_less_and_is_averaged_all_the_same():
    assert averaged([Log(realised=[1.0, 2.0, 3.0]), Log(realised=[3.0, 4.0])]).tolist() == [2.0, 3.0]


def test_trend_and_intervals_of_a_case_known_by_hand():
    assert slope([4, 16, 64, 256], [0.1, 0.2, 0.3, 0.4]) == pytest.approx(5)
    assert interval([0.5, 0.5, 0.5]) == (0.5, 0.5, 0.5)
    mean, low, high = interval([0.0, 1.0])
    assert (mean, low, high) == (0.5, 0.0, 1.0)
    # Mean 0, standard error √(2.5/5), and 2.776 of them by the table of Student's t with four degrees.
    assert interval([-2, -1, 0, 1, 2]) == pytest.approx((0, -2.776 * 0.5**0.5, 2.776 * 0.5**0.5), abs=1e-3)


def test_the_ratio_of_kls_is_the_median_over_the_updates_of_all_runs():
    logs = [Log(alpha=[1.0, 2.0], q=[0.01, 0.01], realised=[0.01, 0.08]), Log(alpha=[1.0], q=[1.0], realised=[9.0])]
    assert kl_ratio(logs) == pytest.approx(2)
    assert kl_ratio(logs, q_factor=2) == pytest.approx(1)


def test_a_run_in_a_process_of_its_own_is_the_same_whatever_instructions_the_processor_has(monkeypatch):
    run = Run(updates=10, rank=4)
    found = []
    for mkl, aten in ((None, None), ("AVX2", "avx2")):
        for name, value in (("MKL_CBWR", mkl), ("ATEN_CPU_CAPABILITY", aten)):
            monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
        experiments._DONE.clear()
        found.append(vars(experiments.logs([run], Setting(), "")[run]))
    np.testing.assert_equal(*found)
    assert vars(train(run)) != found[0]  # this process's order of sums is another
