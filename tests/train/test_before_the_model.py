"""What does not fit the model, a file of adapters or a state is seen in their headers, before anything is loaded."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from library.config.problems import ConfigError
from library.train.saving import resume_check
from tests.training import config_of, pictures, problems_and_remarks, train

FLUX, SDXL = "flux_train_network", "sdxl_train_network"
LOKR = {"network_module": "lycoris.kohya", "network_args": ["algo=lokr"]}


@pytest.fixture(scope="module")
def findings_of(demo, tmp_path_factory):
    """Two short trainings, their files and their states."""
    folder = tmp_path_factory.mktemp("made")
    base = {
        "train_data_dir": pictures(folder / "images"),
        "resolution": 64,
        "min_bucket_reso": 64,
        "output_dir": folder / "out",
        "max_train_steps": 1,
        "save_state_on_train_end": True,
    }
    for name, how in (("plain", {}), ("lokr", LOKR)):
        train(config_of(demo, FLUX, **base, output_name=name, **how))
    plain = load_file(folder / "out" / "plain.safetensors")
    save_file({name.replace("_blocks_", "_blocks_7"): t for name, t in plain.items()}, folder / "else.safetensors")
    save_file(
        {name: t for name, t in plain.items() if "up" not in name or "linear1" not in name}, folder / "half.safetensors"
    )
    save_file({name: t * torch.nan for name, t in plain.items()}, folder / "nan.safetensors")
    save_file(plain, folder / "chroma.safetensors", {"ss_base_model_version": "chroma"})
    wide = (torch.cat([t, t], 1) if name.endswith("down.weight") else t for name, t in plain.items())
    save_file(dict(zip(plain, wide, strict=True)), folder / "wide.safetensors")

    def findings(script, **how):
        values = {name: str(value).replace("HERE", str(folder)) for name, value in how.items() if "HERE" in str(value)}
        config = config_of(demo, script, **base | {"output_name": "x", "max_train_steps": 9} | how | values)
        return problems_and_remarks(config)

    return findings


FITS = [
    {"resume": "HERE/out/plain-state"},
    {"resume": "HERE/out/lokr-state", **LOKR},
    {"resume": "HERE/out/plain-state", "lr_scheduler": "cosine", "learning_rate": 1e-5},
    {"network_weights": "HERE/out/plain.safetensors"},
    {"network_weights": "HERE/out/plain.safetensors", "network_dim": 2, "dim_from_weights": True},
    {"network_weights": "HERE/out/lokr.safetensors", **LOKR},
    {"base_weights": "HERE/out/plain.safetensors"},
    {"network_module": "lycoris.kohya", "network_args": ["algo=LoKr", "preset=attn-mlp"], "network_dim": 100_000},
    {"network_args": ["train_double_block_indices=none"]},
]
FITS_NOT = [
    ({"resume": "HERE/out/plain-state", "network_dim": 2}, "network_dim 8, and this is 2"),
    ({"resume": "HERE/out/plain-state", "optimizer_type": "Adafactor"}, "optimizer_type AdamW, and this is Adafactor"),
    (
        {"resume": "HERE/out/plain-state", "network_args": ["loraplus_lr_ratio=4"]},
        "as network_args was not set and is loraplus_lr_ratio=4; set this back",
    ),
    ({"resume": "HERE/out/plain-state", "network_args": ["train_blocks=single"]}, "made with other networks"),
    (
        {"resume": "HERE/out/plain-state", "network_train_unet_only": False},
        "as network_train_unet_only was true and is false; set this back",
    ),
    ({"resume": "HERE/out/plain-state", "network_train_unet_only": False}, "only here: "),
    (
        {"resume": "HERE/out/plain-state", "network_args": ["loraplus_lr_ratio=4"]},
        "other groups of parameters (unet: 32) than this config makes (unet: 16, unet plus: 16)",
    ),
    ({"resume": "HERE/out/plain-state", **LOKR}, "network_module networks.lora_flux, and this is lycoris.kohya"),
    ({"resume": "HERE/out/lokr-state", **LOKR, "network_args": ["algo=loha"]}, "made with other networks"),
    ({"network_weights": "HERE/out/plain.safetensors", "network_dim": 2}, "has rank 8 in the file and 2 here"),
    ({"network_weights": "HERE/out/plain.safetensors", "network_args": ["img_attn_dim=2"]}, "has rank 8 in the file"),
    ({"network_weights": "HERE/out/plain.safetensors", **LOKR}, "network_weights: nothing in"),
    ({"network_weights": "HERE/out/lokr.safetensors"}, "is LoKr, not a plain LoRA"),
    ({"network_weights": "HERE/else.safetensors"}, "network_weights: nothing in"),
    ({"base_weights": "HERE/else.safetensors"}, "base_weights: nothing in"),
    *(
        ({option: f"HERE/{file}.safetensors"}, words)
        for option in ("network_weights", "base_weights")
        for file, words in (
            ("half", "lacks its up matrix: the file is damaged"),
            ("nan", "with NaN or infinity, first"),
            ("wide", "has another size than this model's layer"),
        )
    ),
    ({"network_args": ["train_blocks=double", "train_double_block_indices=50"]}, "nothing is trained"),
    ({"unet_lr": 0}, "unet_lr is 0, so nothing would be trained"),
]


@pytest.mark.parametrize("how", FITS, ids=str)
def test_what_fits_is_not_spoken_of(findings_of, how):
    assert findings_of(FLUX, **how)[0] == []


@pytest.mark.parametrize(("how", "words"), FITS_NOT, ids=str)
def test_mismatch_is_reported_in_one_sentence(findings_of, how, words):
    (said,), remarks = findings_of(FLUX, **how)
    assert words in str(said)
    assert not any("the training continues" in str(remark) for remark in remarks)


@pytest.mark.parametrize("arguments", [["train_double_block_indices="], ["train_single_block_indices = "]], ids=str)
def test_a_state_in_which_an_empty_list_was_all_blocks_says_what_to_write(findings_of, monkeypatch, arguments):
    monkeypatch.setattr(resume_check, "shaping_changes", lambda *_: None)  # as the state has the same arguments
    (said,), _ = findings_of(FLUX, resume="HERE/out/plain-state", network_args=arguments)
    assert f"write {arguments[0].split('=')[0].strip()}=all in network_args" in str(said)
    (said,), _ = findings_of(FLUX, resume="HERE/out/plain-state", network_args=["train_blocks=single"])
    assert "resume with its own config" in str(said)


def test_states_of_other_trainings_are_reported(findings_of):
    (said,) = findings_of("flux_train", resume="HERE/out/plain-state")[0]
    assert "is the state of a training of adapters, and this one trains a whole model" in str(said)
    (said,) = findings_of(SDXL, resume="HERE/out/plain-state")[0]
    assert "is the state of a training of another family" in str(said)


@pytest.mark.parametrize("how", [{"block_lr": ",".join("0" * 23)}, {"learning_rate": 0}], ids=str)
def test_full_training_without_trained_weights_is_reported(findings_of, how):
    (said,) = findings_of("sdxl_train", **how)[0]
    assert str(said).startswith(f"{next(iter(how))} is 0, so nothing would be trained")


def test_several_mismatches_are_reported_together(findings_of):
    problems, _ = findings_of(
        FLUX,
        unet_lr=0,
        network_dim=2,
        network_weights="HERE/out/plain.safetensors",
        resume="HERE/out/plain-state",
        base_weights="HERE/gone.safetensors",
    )
    assert len(problems) == 4 and len({str(line).split(":")[0].split(" ")[0] for line in problems}) == 4


HIGH = [
    ({"unet_lr": 1e3}, "unet_lr 1000.0 is very high"),
    ({"network_alpha": 1e6}, "network_alpha 1e+06 is far above"),
    ({"network_alpha": 0.016, "network_dim": 16}, "network_alpha 0.016 is far below network_dim (16)"),
    (
        {"network_weights": "HERE/chroma.safetensors"},
        "was trained for chroma (ss_base_model_version), and this model is flux1",
    ),
    (
        {"base_weights": "HERE/chroma.safetensors"},
        "was trained for chroma (ss_base_model_version), and this model is flux1",
    ),
]


@pytest.mark.parametrize(("how", "words"), HIGH, ids=str)
def test_what_is_legal_and_odd_is_a_remark(findings_of, how, words):
    problems, remarks = findings_of(FLUX, **how)
    assert not problems and any(words in str(line) for line in remarks)


@pytest.mark.parametrize("value", ["1e30", "inf"])
def test_numbers_beyond_all_meaning_are_refused(demo, value):
    with pytest.raises(ConfigError, match="learning_rate must be"):
        config_of(demo, FLUX, learning_rate=value)
