"""What is not training loses nothing: whatever fails beside it is a warning, and the result is the one that it would
have been."""

import errno
import sys
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

from library.config.problems import ConfigError
from library.families.shared import vae_memory
from library.families.shared.sampler import Sampler
from library.outputs import verify
from library.outputs.trackers import Trackers
from library.train.evaluation import samples, validation
from library.train.journal import Journal
from tests.training import cached, config_of, pictures, train

STEPS = 3
FAULTS = {
    "memory of the GPU": lambda: torch.OutOfMemoryError("CUDA out of memory"),
    "memory of the computer": lambda: MemoryError(),
    "disk": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "network": lambda: ConnectionError("the wire is cut"),
    "a bad prompt": lambda: ConfigError("a prompt that cannot be used"),
    "a broken VAE": lambda: RuntimeError("Given groups=1, weight of size [4, 4]"),
    "anything": lambda: AssertionError(),
}
PLACES = [
    (Sampler, "latents"),  # denoising a sample
    (Sampler, "decoded"),  # its VAE
    (validation.ValidationRunner, "_loss"),
    (Journal, "sampled"),
    (Journal, "validated"),
    (verify, "differences"),  # reading a saved file back
]


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    return cached(pictures(tmp_path_factory.mktemp("eight"), ((64, 64),) * 8, repeats=1))


@pytest.fixture
def run(demo, eight, tmp_path, monkeypatch):
    """A training that does something beside every step, and once before the first."""
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda token=None: Hub())
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("zorb --w 64 --h 64 --s 1 --d 1\nred zorb --w 64 --h 64 --s 1 --d 2\n", encoding="utf-8")

    def start(name, script="flux_train_network", **values):
        beside = {
            "sample_prompts": prompts,
            "sample_every_n_steps": 1,
            "sample_at_first": True,
            "validation_split": 0.25,
            "validate_every_n_steps": 1,
            "save_every_n_steps": 1,
            "huggingface_repo_id": "me/cats",
            "huggingface_token": "hf_x",
            "max_train_steps": STEPS,
        }
        where = {"output_dir": tmp_path / name, "output_name": "m", "train_data_dir": eight}
        return train(config_of(demo, script, **where, **beside | values))

    return start


class Hub:
    """A repository that takes everything."""

    fault = None

    def create_repo(self, *_, **__):
        """It is there."""

    def upload_file(self, *_, **__):
        if Hub.fault:
            raise Hub.fault()


@pytest.fixture(scope="module")
def baseline():
    """What a training learned that nothing has disturbed; filled by the first test that trains one."""
    return {}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_fails_beside_the_training_at_its_first_middle_and_last_step_is_a_warning(
    run, baseline, fault, monkeypatch
):
    if not baseline:
        baseline |= run("undisturbed").tensors()
    monkeypatch.setattr(Hub, "fault", FAULTS[fault])
    failed = set()
    for place, name in PLACES:
        owners = [place, *place.__subclasses__()] if isinstance(place, type) else [place]
        owners += [below for one in owners if isinstance(one, type) for below in one.__subclasses__()]
        for owner in {one for one in owners if name in vars(one)}:

            def fails(*given, place=(place, name)):
                failed.add(place)
                raise FAULTS[fault]()

            monkeypatch.setattr(owner, name, fails)
    disturbed = run("disturbed")
    monkeypatch.undo()
    assert disturbed.facts["state"] == "finished" and disturbed.facts["error"] is None
    assert disturbed.losses and len(disturbed.losses) == STEPS
    assert all(torch.equal(tensor, baseline[name]) for name, tensor in disturbed.tensors().items())
    said = [str(event["text"]) for event in disturbed.events("warning")]
    assert (Sampler, "latents") in failed and (validation.ValidationRunner, "_loss") in failed
    assert sum("sample_prompts: the sample" in text for text in said) == STEPS + 1
    assert sum("validation is left out" in text for text in said) == STEPS
    assert sum("could not be uploaded" in text for text in said) == STEPS + 1


def test_samples_that_do_not_fit_are_decoded_in_tiles_and_the_training_is_unchanged(run, baseline, monkeypatch):
    if not baseline:
        baseline |= run("undisturbed").tensors()

    def fails(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(AutoencoderKL, "decode", fails)
    monkeypatch.setattr(vae_memory, "SMALL", 0)
    outcome = run("tiled")
    assert [str(event["text"]) for event in outcome.events("warning")] == [samples.DECODED["tiles"]]
    assert len(outcome.events("sample")) == 2 * (STEPS + 1) and not outcome.events("sample_failed")
    assert all(torch.equal(tensor, baseline[name]) for name, tensor in outcome.tensors().items())


def test_prompts_that_cannot_be_encoded_at_first_are_encoded_when_they_are_needed(run, monkeypatch):
    real, calls = Sampler.encode_request, []

    def encode_request(self, request):
        calls.append(request.prompt)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, request)

    monkeypatch.setattr(Sampler, "encode_request", encode_request)
    outcome = run("encoded", max_train_steps=1)
    (said,) = (str(event["text"]) for event in outcome.events("warning"))
    assert "could not be encoded" in said and "gradient_checkpointing" not in said
    assert len(outcome.events("sample")) == 4 and not outcome.events("sample_failed")
    assert calls == ["zorb", "zorb", "red zorb"]  # once for both times that samples are made


def test_advice_for_samples_names_nothing_that_only_steps_need(run, monkeypatch):
    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    for owner in (
        Sampler,
        *Sampler.__subclasses__(),
        *(b for a in Sampler.__subclasses__() for b in a.__subclasses__()),
    ):
        if "latents" in vars(owner):
            monkeypatch.setattr(owner, "latents", fails)
    outcome = run("small", max_train_steps=1, sample_at_first=False)
    (said,) = (str(event["text"]) for event in outcome.events("warning"))
    assert "ask for smaller sample images" in said and "train_batch_size" not in said and "lower resolution" not in said


def test_a_resumed_training_does_not_sample_its_base_model_again(run, tmp_path):
    first = run("first", max_train_steps=1, save_state=True)
    resumed = run("resumed", max_train_steps=2, resume=tmp_path / "first" / "m-state")
    assert [event["step"] for event in first.events("sample")] == [0, 0, 1, 1]
    assert [event["step"] for event in resumed.events("sample")] == [2, 2]


def test_a_vae_that_does_not_fit_on_the_gpu_decodes_where_it_is(run, monkeypatch):
    """Moving it for all samples fails once; each sample then finds its own place."""
    real, calls = Sampler.vae_on, []

    def vae_on(self, device):
        calls.append(device)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, device)

    monkeypatch.setattr(Sampler, "vae_on", vae_on)
    outcome = run("moved", max_train_steps=1, sample_at_first=False)
    assert len(outcome.events("sample")) == 2 and not outcome.events("sample_failed") and len(calls) == 3


@pytest.mark.parametrize("name", ["decoded", "sampled", "validated"])
def test_each_place_beside_the_training_fails_alone(run, baseline, name, monkeypatch):
    """With the places before it in order, at every step."""
    if not baseline:
        baseline |= run("undisturbed").tensors()
    owner = Sampler if name == "decoded" else Journal

    def fails(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(owner, name, fails)
    disturbed = run("disturbed")
    assert disturbed.facts["state"] == "finished"
    assert all(torch.equal(tensor, baseline[key]) for key, tensor in disturbed.tensors().items())
    said = [str(event["text"]) for event in disturbed.events("warning")]
    assert sum("broken" in text and "continues" in text for text in said) == STEPS + (name != "validated")


def test_files_are_saved_before_anything_else_is_done_at_a_step(run, monkeypatch):
    order = []
    for event, method in (("validated", "validated"), ("sampled", "sampled"), ("saved", "saved")):
        real = getattr(Journal, method)

        def noted(self, *given, event=event, real=real, **more):
            order.append(event)
            real(self, *given, **more)

        monkeypatch.setattr(Journal, method, noted)
    run("order", sample_at_first=False, max_train_steps=2, save_every_n_steps=2)
    every = ["validated", "sampled", "sampled"]
    assert order == [*every, "saved", "saved", *every]  # the file of step 2 and the final one before its samples


def test_all_of_a_step_is_saved_before_the_first_of_it_is_uploaded(run, tmp_path, monkeypatch):
    there, out = [], tmp_path / "uploaded"

    def upload(_self, path_or_fileobj, path_in_repo, **_):
        there.append((path_in_repo, sorted(path.name for path in out.glob("m*"))))

    monkeypatch.setattr(Hub, "upload_file", upload)
    run("uploaded", save_state=True, save_every_n_steps=1, max_train_steps=2, sample_every_n_steps=None)
    first, second, final = there
    assert first[0] == "m-step00000001.safetensors" and "m-step00000001-state" in first[1]
    assert (second[0], final[0]) == ("m-step00000002.safetensors", "m.safetensors")
    assert {"m.safetensors", "m-state", "m-step00000002-state"} <= {*second[1]}


# ---- decoding with little memory


class Plain(Sampler):
    def latents(self, request):
        raise NotImplementedError

    def decoder_input(self, latents):
        return latents

    def is_guided(self, request):
        return False

    def encode_request(self, request):
        return {"x": torch.zeros(2, 1)}


def sampler_of(vae):
    family = SimpleNamespace(sample_multiple=16, text_cache=SimpleNamespace(mask=""))
    return Plain(family, SimpleNamespace(vae=vae))


def test_the_vae_goes_back_after_an_error():
    class Moved(torch.nn.Linear):
        where = []

        def to(self, device):
            self.where.append(str(device))
            return self

    tries = sampler_of(Moved(1, 1))
    with pytest.raises(ValueError), tries.vae_on("somewhere"):
        raise ValueError
    assert Moved.where == ["somewhere", "cpu"]


def test_prompt_cache_has_a_limit_and_keeps_prompts_of_one_request():
    from library.families.base import SampleRequest
    from library.families.shared.sampler import MAX_ENCODED_PROMPTS

    sampler = sampler_of(None)
    for number in range(MAX_ENCODED_PROMPTS + 20):
        sampler.remember([SampleRequest(f"prompt {number}")])
    assert len(sampler._known) == MAX_ENCODED_PROMPTS and not sampler.unknown(
        [SampleRequest(f"prompt {MAX_ENCODED_PROMPTS + 19}")]
    )
    assert sampler.unknown([SampleRequest("prompt 0")])
    many = [SampleRequest(f"other {number}") for number in range(MAX_ENCODED_PROMPTS + 5)]
    sampler.remember(many)
    assert not sampler.unknown(many) and len(sampler._known) == MAX_ENCODED_PROMPTS + 5


# ---- trackers


@pytest.mark.parametrize("at", ["beginning", "first", "middle", "last", "picture", "end"])
def test_a_tracker_that_fails_ends_with_one_warning(at, tmp_path, monkeypatch):
    from types import SimpleNamespace

    lines, said = [], []

    def log(numbers, step):
        place = {1: "first", 2: "middle", 3: "last"}.get(step)
        if at == place or (at == "picture" and "sample_0" in numbers):
            raise ConnectionError("the wire is cut")
        lines.append(step)

    def finish():
        if at == "end":
            raise ConnectionError("the wire is cut")

    def init(**_):
        if at == "beginning":
            raise ConnectionError("the wire is cut")
        return SimpleNamespace(log=log, finish=finish)

    client = SimpleNamespace(init=init, Image=lambda picture: picture)
    monkeypatch.setitem(sys.modules, "wandb", client)
    log_options = SimpleNamespace(
        log_with="wandb",
        logging_dir=None,
        wandb_api_key=None,
        wandb_run_name=None,
        log_tracker_config=None,
        log_tracker_name=None,
        log_config=False,
    )
    trackers = Trackers(SimpleNamespace(log=log_options, adapters=True), tmp_path, said.append)
    for step in (1, 2, 3):
        trackers.log({"step": step, "epoch": 1, "loss": 1.0, "avr_loss": 1.0, "lr": {}})
        trackers.image("sample_0", None, 10)
        trackers.validated("step", step, 1.0, 0.0)
    trackers.close()
    assert len(said) == 1 and "Weights & Biases" in str(said[0]) and "the wire is cut" in str(said[0])


def test_curves_that_cannot_be_begun_end_no_training(tmp_path):
    """Where logging_dir is a file."""
    (tmp_path / "logs").touch()
    said, log_options = [], SimpleNamespace(log_with=None, logging_dir=str(tmp_path / "logs"), log_prefix=None)
    log_options.log_tracker_name, log_options.log_config = None, False
    trackers = Trackers(SimpleNamespace(log=log_options, adapters=True), tmp_path, said.append)
    assert not trackers.open and len(said) == 1 and "nothing more is logged to TensorBoard" in str(said[0])
    trackers.close()
