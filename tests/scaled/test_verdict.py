from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scaled.graders.worker import score_of
from scaled.records import Score


@pytest.mark.parametrize("formed", ["maybe", "False", "", 0, 1.0, [True], np.array(1)])
def test_a_form_that_is_no_truth_fails_instead_of_counting_as_true(formed: Any):
    verdict = score_of(Score(1.0, "right", well_formed=formed))
    assert (verdict.reward, verdict.outcome, verdict.well_formed) == (None, "failed", None)
    assert verdict.reason == f"returned well_formed={formed!r}; use True, False or None"


@pytest.mark.parametrize(("formed", "kept"), [(True, True), (False, False), (None, None), (np.bool_(False), False)])
def test_a_form_that_is_a_truth_or_not_said_is_kept(formed: Any, kept: bool | None):
    assert score_of(Score(1.0, "right", well_formed=formed)).well_formed is kept
