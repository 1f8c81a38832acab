"""A config written into the text that it came from."""

import pytest

from library.config.building import build_config
from library.config.commented_toml import MAX_KEPT, to_commented_toml
from library.config.formats import to_toml
from library.config.outside_files import parse_toml
from library.config.schema import flatten_sections
from library.families import config_class

SDXL = config_class("sdxl_train_network")
TITLE = "SDXL LoRA: accelerate launch sd-scripts/sdxl_train_network.py --config_file THIS_FILE"
OURS = f"""# second try
# {TITLE}
[optim]
learning_rate = 1e-4   # low on purpose
optimizer_type = "AdamW8bit"
optimizer_args = [
  "weight_decay=0.1",  # as in the paper
]

# the images
[data]
enable_bucket = true
train_batch_size = 2
"""


def config_of(**values):
    return build_config(SDXL, values, notes=[])


def test_comments_order_and_spelling_stay_and_values_change():
    values = {"optimizer_type": "AdamW8bit", "optimizer_args": ["weight_decay=0.1"], "enable_bucket": True}
    config = config_of(**values, learning_rate="1e-4", train_batch_size="4", lr_scheduler="cosine", network_dim="8")
    changed = OURS.replace("batch_size = 2", "batch_size = 4").replace("]\n\n#", ']\nlr_scheduler = "cosine"\n\n#')
    assert to_commented_toml(OURS, config, TITLE) == f"{changed}\n[network]\nnetwork_dim = 8\n"


@pytest.mark.parametrize(
    ("text", "values", "expected"),
    [
        ("seed = 1 # luck\n", {"seed": 2}, f"# {TITLE}\n\nseed = 2 # luck\n"),
        (f"# {TITLE}\nseed = 1\nlerning_rate = 3\n", {"seed": 1}, f"# {TITLE}\nseed = 1\n"),
        (f"# {TITLE}\nwandb_api_key = 'secret'\n# end\n", {}, f"# {TITLE}\n# end\n"),
        (f"# {TITLE}\nsave_state = true\n", {}, f"# {TITLE}\nsave_state = false\n"),
        ("# sd-scripts/flux_train_network.py, mine\nseed = 1\n", {"seed": 1}, f"# {TITLE}\nseed = 1\n"),
        (f"# {TITLE}\n[steps]\nseed = 1\n# end\n", {"seed": 1, "network_dim": 4}, None),
        (f"# {TITLE}\n# no values yet\n", {"seed": 1}, f"# {TITLE}\n# no values yet\n\n[steps]\nseed = 1\n"),
    ],
)
def test_a_text_is_changed_as_little_as_possible(text, values, expected):
    written = to_commented_toml(text, config_of(**values), TITLE)
    assert written == expected if expected else "# end\n\n[network]\nnetwork_dim = 4\n" in written
    assert build_config(SDXL, flatten_sections(parse_toml(written, "x.toml")), notes=[]) == config_of(**values)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "seed = ",
        "a." * 80 + "b = 1",
        "[[optim]]\nseed = 1\n",
        "seed = 1\n" + "#" * MAX_KEPT,
        'seed = 1\nx = """\n[steps]\n"""\n[steps]\nseed = 2\n',
        "network_dim = nan\n",
    ],
)
def test_whatever_the_text_is_the_result_has_the_values(text):
    config = config_of(seed=1, network_dim=8)
    written = to_commented_toml(text, config, TITLE)
    assert flatten_sections(parse_toml(written, "x.toml")) == {"seed": 1, "network_dim": 8}
    assert "[[" not in written
    if "optim" not in text and "nan" not in text:
        assert written == to_toml(config, TITLE)
