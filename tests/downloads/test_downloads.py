"""Downloads: resumed, checked, refused, and never outside of the folder that was named."""

import errno
import json
import os
import shutil
import threading

import pytest
from huggingface_hub import file_download

from library import families
from library.cli.main import main
from library.config.problems import ConfigError
from library.downloads import finding
from library.downloads import hub as downloads
from library.jobs import jobs
from library.runs import keys, layout
from tests.downloads.conftest import small, sparse

NAME, PATH = "someone/models", "split/a.safetensors"


def quiet(message, done, total):
    """A report that nobody reads."""


def offered(hub, content=None, name=NAME, path=PATH):
    hub.repositories.setdefault(name, {})[path] = small() if content is None else content
    return downloads.repository(name).files[path]


def get(hub, folder, report=quiet, **facts):
    file = offered(hub, **facts)
    return downloads.download_file(file, downloads.target_path(folder, file), report)


def test_a_file_is_downloaded_into_the_folder_of_its_repository(hub, tmp_path):
    told = []
    path = get(hub, tmp_path, lambda name, *said: told.append((str(name), *said)))
    assert path == tmp_path / "models" / "a.safetensors" and path.read_bytes() == small()
    assert [file_of_model.name for file_of_model in path.parent.iterdir()] == ["a.safetensors"]
    assert told[0] == ("a.safetensors", 0, len(small())) and ("a.safetensors", len(small()), len(small())) in told
    assert get(hub, tmp_path) == path and len(hub.requests) == 1  # it is there, and is not asked for again


def test_a_download_goes_on_where_it_stopped(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)

    def cancel(message, done, total):
        if done:
            raise KeyboardInterrupt

    hub.slow = threading.Event()  # the rest is sent after the end of this download only
    with pytest.raises(KeyboardInterrupt):
        get(hub, tmp_path, cancel)
    hub.slow.set()
    file = downloads.repository(NAME).files[PATH]
    part = downloads.unfinished(downloads.target_path(tmp_path, file), file)
    part.write_bytes(small()[:5000])
    assert downloads.still_needed(downloads.target_path(tmp_path, file), file) == len(small()) - 5000
    path = get(hub, tmp_path)
    assert hub.requests[-1] == (PATH, "bytes=5000-") and path.read_bytes() == small() and not part.exists()


def test_a_connection_that_ends_is_taken_up_again(hub, tmp_path, monkeypatch):
    hub.cut[PATH] = 9000
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: hub.cut.clear())
    assert get(hub, tmp_path).read_bytes() == small()
    assert hub.requests[0] == (PATH, "") and hub.requests[1][1].startswith("bytes=")


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (lambda hub: hub.told.update({PATH: "a" * 64}), "SHA-256 differs"),
        (lambda hub: hub.redirects.update({PATH: "http://127.0.0.1:9/secret"}), "not an address of Hugging Face"),
        (lambda hub: hub.redirects.update({PATH: "https://huggingface.co.evil.org/x"}), "huggingface.co.evil.org"),
        (lambda hub: hub.redirects.update({PATH: "https://169.254.169.254/latest"}), "not an address of Hugging Face"),
        (lambda hub: hub.gated.update({NAME: "hf_right"}), "accept its licence at https://huggingface.co/someone"),
    ],
)
def test_what_is_wrong_is_reported_and_leaves_nothing(hub, tmp_path, fault, says):
    hub.repositories[NAME] = {PATH: small()}
    fault(hub)
    with pytest.raises(ConfigError, match=says):
        get(hub, tmp_path / "models")
    assert not [
        file_of_model
        for file_of_model in (tmp_path / "models").rglob("*")
        if file_of_model.is_file() and file_of_model.stat().st_size
    ]


def test_what_cannot_be_read_without_running_code_is_removed(hub, tmp_path):
    with pytest.raises(ConfigError, match="not a safetensors file"):
        get(hub, tmp_path, content=b"\x80\x04pickled" * 50)
    assert list((tmp_path / "models").iterdir()) == []


@pytest.mark.parametrize("path", ["model.ckpt", "pytorch_model.bin", "x.pt", "a.safetensors.exe"])
def test_only_safetensors_are_offered(hub, path):
    hub.repositories[NAME] = {path: small(), PATH: small()}
    assert [*downloads.repository(NAME).files] == [PATH]


@pytest.mark.parametrize(
    "path",
    [
        "../../x.safetensors",
        "a/..safetensors",
        ".safetensors",
        "a/b\\..\\c.safetensors",
        "con.safetensors",
        "a\nb.safetensors",
        "x/~.safetensors",
        "a:b.safetensors",
        "a /.safetensors",
    ],
)
def test_no_name_leads_out_of_the_folder(hub, tmp_path, path):
    file = offered(hub, path=path)
    try:
        place = downloads.target_path(tmp_path / "models", file)
    except ConfigError:
        return
    assert place.resolve().parent == tmp_path / "models" / "models"


@pytest.mark.parametrize(
    "name", ["", "x", "a/b/c", "../b", "a/..", "http://evil/x", "a/b?x=1", "a/b#c", "a@evil.org/b", "a/b\n", "-/../x"]
)
def test_only_names_of_repositories_are_requested(hub, name):
    with pytest.raises(ConfigError, match="owner/name"):
        downloads.repository(name)
    assert hub.tokens == []


def test_what_is_not_there_is_reported(hub):
    with pytest.raises(ConfigError, match="no Hugging Face repository someone/none"):
        downloads.repository("someone/none")
    offered(hub)
    with pytest.raises(ConfigError, match=r"no file b.safetensors; it has split/a.safetensors"):
        downloads.remote_files([f"{NAME}/b.safetensors"])


def test_the_token_opens_a_gated_repository_and_goes_nowhere_else(hub, tmp_path):
    hub.gated[NAME] = "hf_right"
    hub.repositories[NAME] = {PATH: small()}
    assert downloads.repository(NAME).closed
    keys.store_keys({"huggingface_token": "hf_right"})
    assert not downloads.repository(NAME).closed
    assert os.name == "nt" or keys.keys_file().stat().st_mode & 0o777 == 0o600
    elsewhere = hub.address.replace("127.0.0.1", "localhost")
    hub.redirects[PATH] = f"{elsewhere}/x"
    with pytest.raises(ConfigError, match="localhost, which is not an address"):
        get(hub, tmp_path)
    hub.redirects.clear()
    assert get(hub, tmp_path).exists() and hub.tokens[-1] == "Bearer hf_right"


def test_another_file_of_the_name_is_not_overwritten(hub, tmp_path):
    place = tmp_path / "models" / "a.safetensors"
    place.parent.mkdir()
    place.write_bytes(small(seed=1))
    with pytest.raises(ConfigError, match="exists and is another file"):
        get(hub, tmp_path)
    assert place.read_bytes() == small(seed=1) and hub.requests == []


def test_one_file_is_downloaded_once_at_a_time(hub, tmp_path):
    hub.slow = threading.Event()
    file = offered(hub)
    place = downloads.target_path(tmp_path, file)
    began = threading.Event()
    first = threading.Thread(target=downloads.download_file, args=(file, place, lambda *_: began.set()))
    first.start()
    began.wait(10)
    with pytest.raises(ConfigError, match="being downloaded already"):
        downloads.download_file(file, place, quiet)
    hub.slow.set()
    first.join(10)
    assert place.read_bytes() == small() and [asked for _, asked in hub.requests] == [""]


def test_a_full_disk_is_known_before_and_during_a_download(hub, tmp_path, monkeypatch):
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(place)._replace(free=10_000))
    with pytest.raises(ConfigError, match="not enough disk space"):
        get(hub, tmp_path)
    assert hub.requests == []
    monkeypatch.setattr(shutil, "disk_usage", usage)

    def full(address, out, **how):
        out.write(small()[:4000])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_download, "http_get", full)
    with pytest.raises(ConfigError, match="disk is full"):
        get(hub, tmp_path)
    monkeypatch.undo()


def test_the_shell_downloads_a_model_with_its_parts(hub, tmp_path, monkeypatch, capsys):
    chosen = next(facts for facts in families.all_families() if len(facts.part_options) > 1)
    model = chosen.hub_models[0]
    for number, file in enumerate(model.files):
        hub.repositories.setdefault(file.repository, {})[file.path] = small(number)
    monkeypatch.setenv(jobs.JOB_FOLDER_VARIABLE, str(tmp_path / "job"))
    (tmp_path / "job").mkdir()
    assert main(["models", "get", model.title.lower(), "--into", str(tmp_path / "m")]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines == layout.load_facts(tmp_path / "job" / jobs.RESULT)["files"] and len(lines) == len(model.files)
    assert layout.load_facts(tmp_path / "job" / jobs.JOB)["state"] == "finished"
    assert main(["models", "get", "nothing"]) == 1
    said = capsys.readouterr().err
    assert "is not a known model" in said and model.title in said
    assert main(["models", "get"]) == 0 and "34.2 GB" in capsys.readouterr().out


def test_models_are_known_by_their_headers(tmp_path, capsys):
    written_models = {}
    for facts in families.all_families():
        for option, shapes in SHAPES.get(facts.name, {}).items():
            written_models[facts.name, option] = sparse(tmp_path / "any" / f"{len(written_models)}.safetensors", shapes)
    sparse(tmp_path / "any" / "lora.safetensors", {"x.lora_down.weight": (4, 4)})
    sparse(tmp_path / ".hidden" / "h.safetensors", SHAPES["sdxl"][finding.MODEL_OPTION])
    sparse(tmp_path / "shard-00001-of-00002.safetensors", SHAPES["sdxl"][finding.MODEL_OPTION])
    (tmp_path / "damaged.safetensors").write_bytes(b"x" * 100)
    folder = tmp_path / "pipe"
    sparse(folder / "unet" / "x.safetensors", {"a": (2, 2)})
    (folder / "model_index.json").write_text(json.dumps({"_class_name": families.facts_of("sdxl").pipelines[0]}))
    models = {model.path: model for model in finding.find_models([tmp_path, tmp_path / "any"])}
    assert models.keys() == {*written_models.values(), folder}
    for (family, option), path in written_models.items():
        assert option in models[path].uses[family]
    assert finding.MODEL_OPTION in models[folder].uses["sdxl"]
    assert main(["models", "list", str(tmp_path)]) == 0
    assert "an SDXL checkpoint" in capsys.readouterr().out


def test_links_to_other_folders_are_read_once(tmp_path):
    real = sparse(tmp_path / "a" / "x.safetensors", SHAPES["sdxl"][finding.MODEL_OPTION])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "y.safetensors").symlink_to(real)
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    assert len(finding.find_models([tmp_path])) == 1


def test_what_is_offered_can_be_named_in_a_config():
    for facts in families.all_families():
        option_names = {
            option for script in facts.scripts for option in families.options_of(families.config_class(script))
        }
        for model in facts.hub_models:
            options = [file.option for file in model.files]
            assert options[0] == finding.MODEL_OPTION and {*options, *model.options} <= option_names
            assert {*options[1:]} <= facts.part_options.keys()
            assert all(file.size > 10**8 and file.path.endswith(".safetensors") for file in model.files)


# The tensors by which each part of a model is known.
SHAPES = {
    "sdxl": {
        finding.MODEL_OPTION: {
            "model.diffusion_model.input_blocks.0.0.weight": (4, 4),
            "conditioner.embedders.1.x": (2, 2),
        },
        "vae": {"decoder.conv_in.weight": (512, 4, 3, 3), "decoder.mid.block_1.conv1.weight": (4, 4)},
    },
    "flux": {
        finding.MODEL_OPTION: {
            "double_blocks.0.img_attn.qkv.weight": (4, 4),
            "img_in.weight": (3072, 64),
            "final_layer.linear.weight": (64, 3072),
        },
        "clip_l": {
            "text_model.embeddings.token_embedding.weight": (49408, 768),
            "text_model.encoder.layers.0.x": (2, 2),
        },
        "t5xxl": {"encoder.block.0.layer.0.SelfAttention.q.weight": (4096, 4096)},
        "ae": {"decoder.conv_in.weight": (512, 16, 3, 3), "decoder.mid.block_1.conv1.weight": (4, 4)},
    },
    "qwen_image": {
        finding.MODEL_OPTION: {"txt_norm.weight": (4,), "transformer_blocks.0.img_mod.1.weight": (4, 4)},
        "text_encoder": {"model.layers.0.self_attn.q_proj.bias": (4,), "model.embed_tokens.weight": (4, 4)},
        "vae": {"decoder.conv_in.weight": (384, 16, 3, 3, 3), "encoder.conv_in.weight": (96, 3, 3, 3, 3)},
    },
}
