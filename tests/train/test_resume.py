"""Going on from a saved state: exactly as if the training had never stopped, or with the reason why not."""

import json
import re

import pytest
import torch

from library.check import preflight
from library.config.problems import ConfigError
from library.outputs import paths
from library.runs import reader
from library.train import stop_requests
from library.train.saving import deciding_options, resume_state, state_files
from library.train.step_log import StepLog
from tests.training import cached, config_of, listing, pictures, short_captions, train  # noqa: F401

# Everything that draws random numbers, forgets or remembers. Exact resumes of each family: contract/test_family.py.
LIVELY = {
    "sdxl_train_network": {
        "network_dropout": 0.2,
        "network_train_unet_only": False,
        "cache_text_encoder_outputs": False,
        "text_encoder_lr": [1e-3],
        "lr_scheduler": "cosine",
        "lr_warmup_steps": 3,
        "noise_offset": 0.1,
        "multires_noise_iterations": 3,
        "min_snr_gamma": 5,
        "gradient_accumulation_steps": 2,
    },
    "flux_train_network": {
        "network_args": ["loraplus_lr_ratio=4"],
        "ema_decay": 0.9,
        "scale_weight_norms": 0.5,
        "ip_noise_gamma": 0.1,
        "ip_noise_gamma_random_strength": True,
        "timestep_sampling": "flux_shift",
        "gradient_checkpointing": True,
    },
    "sdxl_train": {
        "optimizer_type": "Adafactor",
        "optimizer_args": ["relative_step=False", "scale_parameter=False"],
        "ema_decay": 0.9,
        "train_text_encoder": True,
        "cache_text_encoder_outputs": False,
        "cache_latents": False,
        "flip_aug": True,
        "random_crop": True,
        "color_aug": True,
        "lr_scheduler": "linear",
    },
    "flux_train": {
        "full_bf16": True,
        "mixed_precision": "bf16",
        "fused_backward_pass": True,
        "optimizer_type": "Adafactor",
        "optimizer_args": ["relative_step=False"],
        "max_grad_norm": 1.0,
    },
    "qwen_image_train": {"blocks_to_swap": 1, "max_grad_norm": 1.0},
    "anima_train": {"blocks_to_swap": 1, "max_grad_norm": 1.0, "llm_adapter_lr": 0.0, "mlp_lr": 1e-3},
}
CAPTIONS = {"shuffle_caption": True, "caption_dropout_rate": 0.2, "keep_tokens": 1, "token_warmup_step": 8}
# Two stops and the end, over more than one epoch of four batches.
STEPS = {
    "sdxl_train_network": (1, 3, 4),
    "sdxl_train": (3, 5, 6),
    "flux_train_network": (3, 5, 6),
    "flux_train": (3, 5, 6),
    "qwen_image_train": (2, 5, 6),
    "anima_train": (2, 5, 6),
}


@pytest.fixture(scope="module")
def ten(tmp_path_factory):
    """Ten pictures in two sizes: an epoch of six batches, two of them short."""
    return cached(pictures(tmp_path_factory.mktemp("ten"), ((64, 64),) * 5 + ((128, 64),) * 5, repeats=1))


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    """Six pictures in two sizes: an epoch of four batches, two of them short."""
    return cached(pictures(tmp_path_factory.mktemp("six"), ((64, 64),) * 3 + ((128, 64),) * 3, repeats=1))


def trained(demo, data, output, script="flux_train_network", **values):
    cached = values.get("cache_text_encoder_outputs", True)
    base = {"train_data_dir": data, "output_dir": output, "output_name": "m", "min_bucket_reso": 64}
    base |= {"resolution": 96, "max_train_steps": STEPS[script][-1]} | ({} if cached else CAPTIONS)
    return train(config_of(demo, script, **base | values))


@pytest.fixture
def run(demo, ten, tmp_path):
    return lambda script="flux_train_network", folder="out", **values: trained(
        demo, ten, tmp_path / folder, script, **values
    )


@pytest.fixture(scope="module")
def after_four(demo, ten, tmp_path_factory):
    """The state of a training after four steps."""
    done = trained(demo, ten, tmp_path_factory.mktemp("four"), max_train_steps=4, save_state_on_train_end=True)
    return done.file.with_name("m-state")


@pytest.fixture
def stop_after(monkeypatch):
    """Ask for a stop after a step, as the page does; a slow disk does not make the training look less often here."""
    monkeypatch.setattr(stop_requests, "MAX_READ_SHARE", 1e9)
    push = StepLog.push

    def ask(step):
        def logged(self, *args):
            push(self, *args)
            if self._clock.step == step:
                (self._journal.record.folder / "stop").write_text("after_step")

        monkeypatch.setattr(StepLog, "push", logged)

    return ask


@pytest.mark.parametrize("script", LIVELY)
def test_twice_interrupted_is_bit_for_bit_the_same(run, six, stop_after, script):
    how = {"train_data_dir": six, "save_state_on_train_end": True, **LIVELY[script]}
    straight = run(script, "straight", **how)
    lines, resume = {}, {}
    *_, total = STEPS[script]
    for stop in STEPS[script]:
        stop_after(stop)
        part = run(script, **how, **resume)
        assert part.facts["state"] == ("stopped" if stop < total else "finished")
        lines |= {e["step"]: (e["epoch"], e["loss"], e["avr_loss"], e["lr"]) for e in part.events("step")}
        resume = {"resume": part.file.with_name("m-state")}
    assert not [e for e in part.events("warning") if "resume" in e["text"]]
    assert lines == {e["step"]: (e["epoch"], e["loss"], e["avr_loss"], e["lr"]) for e in straight.events("step")}
    assert len(lines) == total
    whole = reader.progress(part.folder).update()  # and its curve is that of all three
    assert {step: loss for step, loss, _ in whole.curve} == {step: line[1] for step, line in lines.items()}
    assert whole.line.resumed == list(STEPS[script][:-1])

    whole, again = straight.tensors(), part.tensors()
    assert whole.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())
    first, other = (listing(outcome.file.with_name("m-state")) for outcome in (straight, part))
    assert first.keys() == other.keys()
    assert first["model.safetensors"] == other["model.safetensors"]
    progress = [json.loads((o.file.with_name("m-state") / "train_state.json").read_text()) for o in (straight, part)]
    assert progress[0] == progress[1] and progress[0]["current_step"] == total
    if "ema_decay" in LIVELY[script]:
        assert first["ema.safetensors"] == other["ema.safetensors"]


def test_numbers_of_files_go_on_and_old_ones_leave(run, stop_after, tmp_path):
    """Steps and epochs count over all parts; what is outdated is removed across them."""
    how = {"save_every_n_steps": 4, "save_last_n_steps": 4, "save_last_n_steps_state": 8, "save_state": True}
    how |= {"save_every_n_epochs": 1, "save_last_n_epochs": 1, "max_train_steps": 14}
    stop_after(7)
    first = run(**how)
    stop_after(99)
    second = run(**how, resume=first.file.with_name("m-state"))
    names = {name for name in listing(tmp_path / "out") if "/" not in name} - {"runs"}
    # Six steps an epoch: epochs 1 and 2 end at 6 and 12; the third is the last.
    assert names == {
        "m.safetensors",
        "m-state",
        "m-000002.safetensors",
        "m-000002-state",
        "m-step00000008.safetensors",
        "m-step00000012.safetensors",
        "m-step00000004-state",
        "m-step00000008-state",
        "m-step00000012-state",
    }
    assert [event["step"] for event in second.events("step")] == list(range(8, 15))
    assert state_files.read_progress(tmp_path / "out" / "m-000002-state")["current_step"] == 12


def test_train_state_has_the_fields_of_sd_scripts(run, tmp_path):
    run(max_train_steps=8, save_state_on_train_end=True)
    state = json.loads((tmp_path / "out" / "m-state" / "train_state.json").read_text())
    assert (state["current_epoch"], state["current_step"]) == (2, 8)
    names = {path.name for path in (tmp_path / "out" / "m-state").iterdir()}
    assert names == {
        "model.safetensors",
        "optimizer.bin",
        "scheduler.bin",
        "random_states_0.bin",
        "train_state.json",
        "SHA256SUMS",
    }


def test_a_finished_training_says_so(run, tmp_path):
    done = run(max_train_steps=6, save_state_on_train_end=True)
    for more in ({"max_train_steps": 6}, {"max_train_steps": 4}, {"max_train_epochs": 1}):  # of six steps
        with pytest.raises(ConfigError) as raised:
            run(resume=tmp_path / "out" / "m-state", **more)
        assert re.search(
            "after step 6, and this training has (6|4|5) steps, so nothing is left to do", str(raised.value)
        )
        assert "\n" not in str(raised.value)
    longer = run(resume=tmp_path / "out" / "m-state", max_train_steps=7)
    assert [event["step"] for event in longer.events("step")] == [7] and done.facts["step"] == 6
    assert not longer.events("warning")  # a constant learning rate does not look at the length


def test_a_result_that_is_missing_is_written(run, tmp_path):
    """Killed after the last state and before the last file: the steps are done, the file is not."""
    done = run(max_train_steps=3, save_state_on_train_end=True)
    before = done.tensors()
    done.file.unlink()
    again = run(resume=tmp_path / "out" / "m-state", max_train_steps=3)
    assert not again.events("step") and again.facts["state"] == "finished"
    assert all(torch.equal(tensor, again.tensors()[name]) for name, tensor in before.items())


CHANGES = [
    ({"train_batch_size": 1}, ["train_batch_size was 2 and is 1", "the batch sizes or buckets changed"]),
    (
        {"learning_rate": 1e-5, "lr_scheduler": "cosine"},
        ["learning_rate was 0.005 and is 1e-05", "is cosine"],
    ),
    (
        {"seed": 7, "compile": True, "compile_from_step": "100", "compile_backend": "eager"},
        ["the seed stays 42, 7 is not used", "compile was false and is true; compile_from_step was not set and is 100"],
    ),
    ({"optimizer_args": ["weight_decay=0.1"]}, ["optimizer_args was not set and is weight_decay=0.1"]),
    ({"gradient_accumulation_steps": 2}, ["gradient_accumulation_steps was 1 and is 2"]),
]


@pytest.mark.parametrize(("change", "words"), CHANGES, ids=[next(iter(change)) for change, _ in CHANGES])
def test_what_prevents_an_exact_resume_is_reported(run, after_four, change, words):
    part = run(resume=after_four, max_train_steps=6, **change)
    warnings = [event["text"] for event in part.events("warning") if event["text"].startswith("resume")]
    assert all(word in "\n".join(warnings) for word in words), warnings
    assert part.facts["state"] == "finished"
    assert [event["step"] for event in part.events("step")] == [5, 6]


INDUCTOR = {"compile": True, "compile_mode": "default", "compile_backend": "inductor", "compile_scope": "blocks"}
KEEPS_HALF = {"compile_activation_budget": 0.5}
COMPILED_OTHERWISE = [
    ({"compile_mode": "max-autotune"}, "compile_mode was default and is max-autotune"),
    ({"compile_mode": "reduce-overhead"}, ""),  # the same kernels, replayed
    ({"compile_backend": "aot_eager"}, "compile_backend was inductor and is aot_eager"),
    ({"compile_scope": "model"}, "compile_scope was blocks and is model"),
    ({"compile_blocks": "double:all"}, "compile_blocks was not set and is double:all"),
    ({"compile_dynamic": "true"}, "compile_dynamic was auto and is true"),
    ({"compile": False, "compile_mode": "max-autotune"}, "compile was true and is false"),
    ({"compile_activation_budget": 0.3}, "compile_activation_budget was 1.0 and is 0.3"),
    ({"gradient_checkpointing": True}, "gradient_checkpointing was false and is true"),
    ({**KEEPS_HALF, "gradient_checkpointing": True}, "compile_activation_budget was 1.0 and is 0.5"),
    ({"compile": False, **KEEPS_HALF}, "compile was true and is false"),
    ({"blocks_to_swap": 1}, "gradient_checkpointing was false and is true"),  # swapped blocks are checkpointed, too
]


@pytest.mark.parametrize(("change", "words"), COMPILED_OTHERWISE, ids=str)
def test_kernels_of_another_kind_keep_a_resume_from_being_exact(demo, change, words):
    saved, now = (
        deciding_options.deciding_options(config_of(demo, "flux_train_network", **values), 4)
        for values in (INDUCTOR, {**INDUCTOR, **change})
    )
    assert "; ".join(map(str, deciding_options.inexact_differences(saved, now))) == words


def test_where_weights_wait_keeps_a_resume_exact(demo):
    """Bit for bit the same: tests/memory/test_swapping_learning.py."""
    checkpointed = {**INDUCTOR, "gradient_checkpointing": True}
    saved, now = (
        deciding_options.deciding_options(config_of(demo, "flux_train_network", **values), 4)
        for values in (checkpointed, {**checkpointed, "blocks_to_swap": 1})
    )
    assert not [*deciding_options.inexact_differences(saved, now)]


def test_a_changed_rate_holds_from_the_first_step_and_the_check_says_so(run, demo, ten, after_four, tmp_path):
    """Where the state has 5e-3 and the config 1e-5, no weight moves further than 1e-5 in a step of AdamW."""
    from safetensors.torch import load_file

    options = {"learning_rate": 1e-5, "optimizer_args": ["weight_decay=0"], "max_train_steps": 5}
    part = run(resume=after_four, save_state_on_train_end=True, **options)
    assert [event["lr"] for event in part.events("step")] == [{"unet": 1e-5}]
    before, after = (load_file(state / "model.safetensors") for state in (after_four, tmp_path / "out" / "m-state"))
    assert 0 < max(float((after[name] - before[name]).abs().max()) for name in before) <= 1.5e-5
    base = {"train_data_dir": ten, "output_dir": tmp_path / "new", "output_name": "m", "resume": after_four}
    config = config_of(demo, "flux_train_network", min_bucket_reso=64, resolution=96, **base, **options)
    (said,) = [str(problem) for problem in preflight.check_before_training(config) if problem.option == "resume"]
    assert "learning_rate was 0.005 and is 1e-05; optimizer_args was not set and is weight_decay=0" in said


def test_other_images_are_reported_and_epochs_still_end(run, after_four, tmp_path, monkeypatch):
    """Fewer batches an epoch than were done of it. So is another machine."""
    monkeypatch.setattr(resume_state, "computed_by", lambda device: {"the device": "NVIDIA H200"})
    few = pictures(tmp_path / "few", ((64, 64),) * 4, repeats=1)
    part = run(resume=after_four, train_data_dir=few, max_train_steps=9)
    (warning,) = [event["text"] for event in part.events("warning") if event["text"].startswith("resume")]
    assert "the images or captions and the batch sizes or buckets changed" in warning
    assert "the device was cpu and is NVIDIA H200" in warning
    assert [event["epoch"] for event in part.events("step")] == [2, 2, 3, 3, 4]


def test_what_makes_no_difference_is_not_told(run, demo, ten, tmp_path):
    run(max_train_steps=2, save_state_on_train_end=True)
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in ten.rglob("*.*"):
        (moved / path.parent.name).mkdir(exist_ok=True)
        (moved / path.parent.name / path.name).write_bytes(path.read_bytes())
    part = run(
        resume=tmp_path / "out" / "m-state",
        max_train_steps=3,
        train_data_dir=moved,
        output_name="other",
        gradient_checkpointing=True,
        save_precision="bf16",
        max_data_loader_n_workers=0,
        logging_dir=tmp_path / "logs",
    )
    assert not [event for event in part.events("warning") if "resume" in event["text"]]


@pytest.mark.parametrize("how", [{}, {"network_module": "lycoris.kohya", "network_args": ["algo=loha"]}], ids=str)
def test_alphas_of_the_file_that_it_began_from_stay(demo, run, tmp_path, how):
    """That file is not needed any more: the state has all that it gave."""
    file = run(folder="file", max_train_steps=1, network_dim=4, network_alpha=32, learning_rate=1e-2, **how).file
    how = {**how, "network_dim": 4, "network_alpha": 2, "save_state": True, "save_every_n_steps": 2}
    straight = run(folder="straight", network_weights=file, **how)
    state = tmp_path / "straight" / "m-step00000002-state"
    for number in (1, 2):  # the second one from a state that was resumed itself
        resumed = run(folder=f"resumed {number}", resume=state, **how)
        tensors = resumed.tensors()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in straight.tensors().items())
        state = tmp_path / f"resumed {number}" / "m-step00000004-state"


def test_adapters_of_another_shape_are_refused(run, tmp_path):
    run(max_train_steps=2, save_state_on_train_end=True)
    with pytest.raises(ConfigError, match="resume"):
        run(resume=tmp_path / "out" / "m-state", network_dim=2)
    with pytest.raises(ConfigError, match="would be overwritten"):
        run()


def test_a_seed_by_chance_stays_the_same(run, stop_after):
    """Without a seed in the config, the noise of all parts comes from the one that the first part drew."""
    stop_after(3)
    first = run(seed=None, max_train_steps=6)
    stop_after(99)
    second = run(seed=None, max_train_steps=6, resume=first.file.with_name("m-state"))
    whole = run(folder="whole", seed=first.facts["seed"], max_train_steps=6)
    assert first.losses + second.losses == whole.losses


def test_unfinished_things_of_ours_are_removed_and_no_others(run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    dead = f"999999999-{paths.clean_up.__globals__['HOST_MARK']}00000000"
    ours = [f".m-step00000004.{dead}.tmp.safetensors", f".m-state.{dead}.tmp", f".m.{dead}.tmp.safetensors"]
    others = [
        f".n-state.{dead}.tmp",
        f".mm.{dead}.tmp.safetensors",
        ".m.tmp.safetensors",
        "notes.txt",
        ".m-state.tmp",
        ".m-state.1-0000ffffffffff.tmp",
    ]
    for name in [*ours, *others]:
        if "safetensors" in name or "txt" in name:
            (out / name).write_text("x")
        else:
            (out / name).mkdir()
            (out / name / "a").write_text("x")
    run(max_train_steps=1)
    assert {path.name for path in out.iterdir()} == {*others, "m.safetensors", "runs"}


def test_an_exchange_of_folders_that_was_cut_off_is_brought_to_its_end(tmp_path):
    from library.files import HOST_MARK, clean_up

    for number, there in enumerate((("tmp", "old"), ("old",))):
        folder = tmp_path / str(number)
        for kind in there:
            (folder / f".m-state.999999999-{HOST_MARK}00000000.{kind}").mkdir(parents=True)
            (folder / f".m-state.999999999-{HOST_MARK}00000000.{kind}" / kind).write_text("x")
        clean_up(folder, lambda name: name == "m-state")
        assert [path.name for path in folder.iterdir()] == ["m-state"]
        assert [path.name for path in (folder / "m-state").iterdir()] == [there[0]]
