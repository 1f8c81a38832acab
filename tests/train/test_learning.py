"""A LoRA of the small trained model learns a thing that is new to it, and no training with a planted error passes for
that. The bounds, how they are measured, and the errors are in benchmarks/small_model/learning.py."""

import pytest

from benchmarks.small_model import learning


@pytest.fixture(scope="module")
def meter(tmp_path_factory):
    return learning.LearningMeter(tmp_path_factory.mktemp("learning"))


def test_a_lora_learns_the_zorb_and_leaves_the_rest_alone(meter):
    found = learning.train_with(None, meter, seed=1)
    assert not found.failures, found


@pytest.mark.parametrize("error", learning.ERRORS, ids=lambda error: error.__name__)
def test_a_planted_error_breaks_a_bound(meter, error):
    found = learning.train_with(error, meter, seed=1)
    assert found.failures, found
