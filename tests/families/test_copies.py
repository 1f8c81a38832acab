"""A family can be copied: matrix products are timed on a copy, as a family keeps tensors between calls."""

import copy

import pytest

from library import families
from library.config.building import draft
from library.config.schema import options_of

CHOICES = ("model_type", "model_version")  # options of which model of a family it is


def models():
    for script in families.RUNS:
        options = options_of(families.config_class(script))
        named = [(name, value) for name in CHOICES if name in options for value in options[name].choices or ()]
        yield from ((script, {name: value}) for name, value in named or [("pretrained_model_name_or_path", "a")])


@pytest.mark.parametrize(("script", "values"), models(), ids=str)
def test_a_family_of_every_model_can_be_copied(script, values):
    family = families.family_for(draft(families.config_class(script), values))
    copied = copy.deepcopy(family)
    assert type(copied) is type(family) and copied is not family
