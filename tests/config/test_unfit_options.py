"""A form offers no option that each training of its kind refuses."""

import pytest

from library.config.building import Layer, read_layers
from library.config.run_config import INEFFECTIVE_EVERYWHERE
from library.config.schema import options_of
from library.families import RUNS, config_class

NUMBERS = (1, 2, 4, 8, 0.1, 0.5, 0.01, 1e-4, 100)
# What options need beside them that no fix proposes, as only the user knows it.
BESIDE = {
    "dim_from_weights": {"network_weights": "a.safetensors"},
    "base_weights_multiplier": {"base_weights": ["a.safetensors"]},
    "resume_from_huggingface": {"resume": "me/states/folder"},
    "adaptive_noise_scale": {"noise_offset": 0.1},
    "scale_v_pred_loss_like_noise_pred": {"v_parameterization": True},
    "save_state_to_huggingface": {"huggingface_repo_id": "me/states", "save_state": True},
    "early_stop_patience": {"dataset_config": "data.toml"},
}


def other_values(option):
    """Some values besides the default."""
    values = [not option.default] if option.type is bool else []
    values += option.choices if option.choices and not option.open else ()
    values += [number for number in NUMBERS if option.type is float or (option.type is int and number == int(number))]
    return [[value] if option.many else value for value in values if value != option.default]


def is_refused(config, name, value):
    """Whether a value is refused however its problems are solved, short of taking it back."""
    values = {name: value, **{other: it for other, it in BESIDE.get(name, {}).items() if other in options_of(config)}}
    for _ in range(4):
        problems = [problem for problem in read_layers(config, [Layer(values)]).problems if name in problem.options]
        if not problems:
            return False
        fix = {other: now for problem in problems for other, now in problem.fix.items() if other != name}
        if not fix:
            return True
        values |= fix
    return True


@pytest.mark.parametrize("script", RUNS)
def test_no_option_is_offered_that_is_always_refused(script):
    config = config_class(script)
    hidden = {*config.ineffective, *INEFFECTIVE_EVERYWHERE, *config.pending}
    tried = {name: values for name, option in options_of(config).items() if (values := other_values(option))}
    refused = {
        name
        for name, values in tried.items()
        if name not in hidden and all(is_refused(config, name, value) for value in values)
    }
    assert refused == config.unfit & options_of(config).keys()
