"""The start of the form: the preset for each GPU, for any set of preset files, and its effect in the browser."""

import json
import re
from pathlib import Path

import pytest

from kohya_gui.form import start_preset
from kohya_gui.form.api import FormApi
from kohya_gui.form.form import SettingsForm
from kohya_gui.form.start_preset import Gpu
from kohya_gui.form.tabs import FAMILY_TITLES, TABS
from kohya_gui.server.json_api import ApiRequest
from library.check import isolated
from library.config import ineffective
from library.config.building import build_config
from library.config.formats import read_toml
from library.config.schema import changed, flatten_sections
from library.demo import configs
from library.recipes import preset_files
from library.runs import gpu_slots, machine
from tests.page.conftest import FORM

CASES = [(tab, family) for tab in TABS for family in tab.configs]
NAMES = [f"{tab.id}-{family}" for tab, family in CASES]


def write_presets(folder, *names):
    """Write presets with these names to a separate folder."""
    (folder / "sdxl").mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / "sdxl" / f"{name}.toml").write_text(f"# {name}: a sentence.\n", encoding="utf-8")


@pytest.fixture
def few_presets(tmp_path, monkeypatch):
    monkeypatch.setattr(preset_files, "PRESETS_FOLDER", tmp_path)
    write_presets(
        tmp_path, "lora-8gb", "lora-12gb", "lora-24gb", "lora-80gb", "lora-cousin-8gb", "lora-fast", "finetune-24gb"
    )
    return tmp_path


def start_for(gpu, kind="lora"):
    return start_preset.suited(preset_files.of_kind(kind, ["sdxl"]), gpu)


@pytest.mark.parametrize(
    ("memory", "size"),
    [
        (6, 8),
        (7.6, 8),
        (8, 8),
        (10, 8),
        (11, 8),
        (11.6, 12),
        (12, 12),
        (16, 12),
        (22.4, 12),
        (23.6, 24),
        (24, 24),
        (47.5, 24),
        (79, 80),
        (79.6, 80),
        (141, 80),
    ],
)
def test_the_largest_preset_that_fits_the_gpu_is_the_start(few_presets, memory, size):
    preset, why = start_for(Gpu("Gpu", memory))
    assert preset.gigabytes == size and str(why).count(".") == 1
    assert ("less than any preset" in str(why)) == (memory < 7.6) and f"Gpu, {memory:.0f} GB" in str(why)


@pytest.mark.parametrize("gpu", [None, Gpu(), Gpu("Gpu", 12.0)], ids=["none", "unknown", "12 GB"])
@pytest.mark.parametrize("tab", TABS, ids=lambda tab: tab.id)
def test_later_answers_say_of_a_start_what_the_page_said_of_it(monkeypatch, tmp_path, tab, gpu):
    """Such as when its images have been counted, or it is chosen again from the list."""
    monkeypatch.setattr(start_preset, "training_gpu", lambda: gpu)
    form = SettingsForm(tab.id, FAMILY_TITLES, tab.configs, tab.basics)
    api = FormApi({tab.id: form}, {tab.id: tab.kind}, [tmp_path])
    for family, start in start_preset.starts(tab.id, tab.configs, start_preset.results([tmp_path])).items():
        sent = json.dumps({"family": family, "values": {}, "launch": {}})
        question = {"tab": tab.id, "sent": sent, "id": start["id"], "images": 12}
        question["purpose"] = start.get("purpose", "")
        later = api.purpose(ApiRequest(question))
        again = json.loads(api.preset(ApiRequest(question))["fill"])["start"]
        for answer in (later, again):
            assert (str(answer["why"]), [*map(str, answer["notes"])]) == (
                str(start["why"]),
                [*map(str, start["notes"])],
            )


def test_without_a_known_gpu_the_smallest_preset_is_the_start_and_that_is_reported(few_presets):
    preset, why = start_for(None)
    assert preset.gigabytes == 8 and "No NVIDIA GPU found" in str(why)
    preset, why = start_for(Gpu())
    assert preset.gigabytes == 8 and "not known" in str(why)
    listed = [preset.path.stem for preset in preset_files.of_kind("lora", ["sdxl"])]
    assert listed == ["lora-8gb", "lora-12gb", "lora-24gb", "lora-80gb", "lora-cousin-8gb", "lora-fast"]


def test_a_kind_without_presets_takes_those_that_stand_in_and_a_family_without_any_the_defaults(few_presets):
    assert start_for(None, "dreambooth")[0].id == "sdxl/finetune-24gb"
    assert preset_files.of_kind("dreambooth", ["sdxl"]) == preset_files.of_kind("finetune", ["sdxl"])
    assert [p.id for p in preset_files.of_kind("finetune", ["sdxl"])] == ["sdxl/finetune-24gb"]
    assert set(start_preset.starts("lora", TABS[0].configs)) == {"sdxl"}


GPUS = [machine.GpuStatus("0", "NVIDIA RTX 3060", 0.5, 12.0), machine.GpuStatus("1", "NVIDIA RTX 4090", 0.5, 24.0)]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (("0", "1"), Gpu("NVIDIA RTX 3060", 12.0)),
        (("1",), Gpu("NVIDIA RTX 4090", 24.0)),
        (("cpu",), None),
        (("GPU-8f3c",), Gpu("NVIDIA RTX 3060", 12.0)),
        (("MIG-1234",), Gpu()),
    ],
)
def test_the_card_is_the_one_that_a_training_would_get(monkeypatch, visible, expected):
    monkeypatch.setattr(gpu_slots, "devices", lambda: visible)
    monkeypatch.setattr(machine, "read_gpus", lambda: GPUS)
    monkeypatch.setattr(machine, "GPUS", machine.GpuMonitor())
    assert start_preset.training_gpu() == expected


def start_of(tab, family):
    starts = start_preset.starts(tab.id, {family: tab.configs[family]})
    assert family in starts, f"write a preset presets/{family}/{tab.kind}-<N>gb.toml"
    return starts[family]


@pytest.mark.parametrize(("tab", "family"), CASES, ids=NAMES)
@pytest.mark.parametrize("memory", [6, 12, 24, 80])
def test_every_start_is_a_good_one(monkeypatch, tab, family, memory):
    """At least as good as the start of kohya_ss's page."""
    monkeypatch.setattr(start_preset, "training_gpu", lambda: Gpu("Gpu", memory))
    config = build_config(tab.configs[family], start_of(tab, family)["values"], notes=[])
    highest_rate = 1e-3 if tab.kind == "textual-inversion" else 5e-4  # embeddings learn faster than weights
    assert 1e-6 < config.optim.learning_rate <= highest_rate and config.captions.caption_extension == ".txt"
    assert config.data.enable_bucket and config.cache.latents and config.precision.mixed_precision == "bf16"
    assert config.data.resolution and config.save.output_name and config.save.save_precision
    if tab.kind == "lora":
        assert config.network.network_dim >= 8 and config.optim.learning_rate >= 5e-5
    if family == "flux":
        assert config.noise.model_prediction_type == "raw" and config.model.guidance_scale == 1.0


@pytest.mark.parametrize(("tab", "family"), CASES, ids=NAMES)
def test_where_no_gpu_is_found_the_start_does_not_compile_and_says_so(monkeypatch, tab, family):
    def opened(gpu):
        monkeypatch.setattr(start_preset, "training_gpu", lambda: gpu)
        start = start_of(tab, family)
        assert gpu or sum("GPU" in str(note) for note in (start["why"], *start["notes"])) == 1  # mentioned exactly once
        return (
            str(start["text"]),
            [*map(str, start["notes"])],
            build_config(tab.configs[family], start["values"], notes=[]),
        )

    text, notes, config = opened(None)
    assert text and not re.search("compiled|CUDA graphs|per step|on the GPU|fp8|bf16", text)
    assert "Compiling, bf16 and fp8 are switched off." in notes and "compile" not in changed(config)
    precision = config.precision  # bf16 convolutions may take a processor a hundred times as long
    assert precision.mixed_precision == "no" and not precision.full_bf16 and not precision.fp8_base
    assert list(ineffective.remarks(config, [])) == []  # no option of compiling is left without effect
    text, notes, config = opened(Gpu("Gpu", 24.0))
    assert "compiled" in text and not notes and config.compile.compile and config.compile.compile_fallback


def test_what_only_compiled_blocks_do_is_not_told_of_without_a_gpu(monkeypatch):
    monkeypatch.setattr(start_preset, "training_gpu", lambda: None)
    preset = preset_files.by_id("zimage/lora-24gb")
    assert str(start_preset.preset_as_start("lora", preset, TABS[0].configs["zimage"], "")["text"]) == "Rank 16"


@pytest.mark.parametrize(("capability", "other"), [((8, 6), True), ((8, 9), False), (None, False)])
def test_a_gpu_without_fp8_times_products_instead(monkeypatch, capability, other):
    monkeypatch.setattr(start_preset, "training_gpu", lambda: Gpu("Gpu", 24.0, capability))
    start = start_preset.starts("lora", {"flux": TABS[0].configs["flux"]})["flux"]
    config = build_config(TABS[0].configs["flux"], start["values"], notes=[])
    precision, share = config.precision, 0.2 if other else 0.3  # blocks keep more where products are not in 8 bits
    assert precision.fp8_base and precision.auto_compute is other and precision.fp8_compute is not other
    assert config.compile.compile_activation_budget == share and f"{share:.0%} of activations kept" in str(
        start["text"]
    )
    assert len(start["notes"]) == 2 * other


TWICE = [preset for preset in preset_files.all_presets() if read_toml(preset.path).get("fp8_transposed_weights")]


@pytest.mark.parametrize("preset", TWICE, ids=lambda preset: preset.id)
def test_only_a_gpu_with_fp8_products_stores_weights_twice(monkeypatch, preset):
    stores, shows = [], []
    for gpu in (Gpu("Gpu", 141.0, (9, 0)), Gpu("Gpu", 141.0, (8, 0)), None):
        monkeypatch.setattr(start_preset, "training_gpu", lambda gpu=gpu: gpu)
        start = start_preset.preset_as_start("lora", preset, TABS[0].configs[preset.family], "")
        stores.append(start["values"].get("fp8_transposed_weights") in (True, "true"))
        shows.append("weights stored twice" in str(start["text"]))
    assert stores == [True, False, False] and shows[0] and not shows[2]


@pytest.mark.parametrize(
    ("kind", "family", "half"),
    [("lora", "sdxl", "fp16"), ("lora", "flux", "fp16"), ("finetune", "sdxl", "bf16"), ("lora", "zimage", "bf16")],
)
def test_a_gpu_without_bf16_computes_in_fp16_where_model_and_options_allow_it(monkeypatch, kind, family, half):
    monkeypatch.setattr(start_preset, "training_gpu", lambda: Gpu("Gpu", 24.0, (7, 5)))
    config = next(tab for tab in TABS if tab.kind == kind).configs[family]
    start = start_preset.starts(kind, {family: config})[family]
    built = build_config(config, start["values"], notes=[])
    assert (built.precision.mixed_precision, built.save.save_precision) == (half, half)
    assert not built.precision.fp8_compute and sum("bf16" in str(note) for note in start["notes"]) == 1


@pytest.mark.parametrize(("memory", "alone"), [(6.0, True), (8.0, False)])
def test_a_start_that_leaves_no_memory_to_spare_says_so_in_a_note(monkeypatch, memory, alone):
    monkeypatch.setattr(start_preset, "training_gpu", lambda: Gpu("Gpu", memory))
    start = start_preset.starts("lora", {"flux": TABS[0].configs["flux"]})["flux"]
    assert any("close other programs" in str(note) for note in start["notes"]) is alone
    assert "compiled; " in str(start["text"]) and start_preset.ALONE not in str(start["text"])
    least = next(preset for preset in preset_files.all_presets() if preset.id == "flux/lora-6gb")
    other = start_preset.preset_as_start("lora", least, TABS[0].configs["flux"], "")
    assert any("close other programs" in str(note) for note in other["notes"]) is alone
    assert (start_preset.ALONE in start_preset.description_for(least, Gpu("Gpu", memory)).settings) is alone


def test_what_a_preset_sets_is_no_remark_once_its_switch_is_off_and_what_was_typed_is_one(monkeypatch):
    monkeypatch.setattr(start_preset, "training_gpu", lambda: Gpu("Gpu", 12.0))
    values = start_preset.starts("lora", TABS[0].configs)["sdxl"]["values"]
    config = build_config(TABS[0].configs["sdxl"], {**values, "compile": False}, notes=[])
    texts = [*ineffective.remarks(config, []), "12 images enlarged"]
    assert len(texts) > 2
    report = {"findings": [isolated.finding(text, "other", "hint") for text in texts]}
    left = [
        finding["text"] for finding in isolated.without_ineffective(report, {"compile_mode", "resolution"})["findings"]
    ]
    assert left == ["compile_mode has no effect here: compile is off", "12 images enlarged"]


# ---- in a browser


def held(visitor, tab):
    """The form's contents as a config: its differences from the defaults."""
    sent = visitor.held(tab.id)
    config = build_config(tab.configs[sent["family"]], sent["values"], notes=[])
    values = flatten_sections(changed(config))
    folder = values.pop("output_dir", "")  # proposed with every start, as presets leave it open
    assert not folder or Path(folder).parts[-2:] == ("kohya", "output")
    return values


def begins(tab, family):
    """The contents of an untouched form: its start preset, and a name."""
    start = start_preset.starts(tab.id, {family: tab.configs[family]})[family]
    preset = next(p for p in preset_files.of_kind(tab.id, [family]) if p.id == start["id"])
    preset_options = flatten_sections(changed(start_preset.apply_preset(preset, tab.configs[family], {}, [])))
    return str(preset.title), {**preset_options, "output_name": f"{family}-{tab.id}"}


@pytest.mark.browser
def test_each_tab_opens_on_its_start_one_click_is_the_defaults_and_one_more_the_start_again(visit):
    visitor = visit()
    page = visitor.page
    for tab in TABS:
        visitor.tab(tab.title)
        for family, title in (("sdxl", "SDXL"), ("flux", "FLUX.1")):
            if family not in tab.configs:
                continue
            visitor.family(title)
            name, expected = begins(tab, family)
            line = page.locator(".start:visible")
            assert line.locator("b").inner_text() == name
            assert held(visitor, tab) == expected
            assert not page.locator(".changed:visible").count()
            line.get_by_role("button", name="sd-scripts' defaults").click()
            line.locator("b", has_text="sd-scripts' defaults").wait_for()
            assert held(visitor, tab) == {}
            line.get_by_role("button", name=name).click()
            line.locator("b", has_text=name).wait_for()
            assert held(visitor, tab) == expected


@pytest.mark.browser
def test_another_family_brings_its_start_and_what_was_typed_stays(visit):
    visitor, lora = visit(), TABS[0]
    page = visitor.page
    _, sdxl = begins(lora, "sdxl")
    _, flux = begins(lora, "flux")
    visitor.fill(learning_rate="0.0003", train_data_dir="/images")
    visitor.family("FLUX.1")
    typed = {"learning_rate": 0.0003, "train_data_dir": "/images"}
    assert held(visitor, lora) == {**flux, **typed}
    assert set(visitor.held()["typed"]) == set(typed)
    assert page.locator(".changed:visible [data-option]").count() == 2
    visitor.open()  # a reload keeps the edited form and its start
    assert held(visitor, lora) == {**flux, **typed}
    page.locator(".field:has(#lora-learning_rate) .reset").click()  # to the start's value, not the default of 2e-6
    assert held(visitor, lora) == {**flux, "train_data_dir": "/images"}
    visitor.family("SDXL")
    assert held(visitor, lora) == {**sdxl, **typed}  # each family keeps its edits
    visitor.fill(output_name="mine", max_train_steps="7", learning_rate=sdxl["learning_rate"])
    page.get_by_role("button", name="sd-scripts' defaults").locator("visible=true").click()
    visitor.until("Paths and names are kept")
    assert held(visitor, lora) == {"train_data_dir": "/images", "output_name": "mine"}
    page.locator(".message .undo").click()
    visitor.until("The form is as it was before.")
    assert held(visitor, lora) == {**sdxl, "train_data_dir": "/images", "output_name": "mine", "max_train_steps": 7}
    assert page.locator(".start:visible b").inner_text() == begins(lora, "sdxl")[0]


@pytest.mark.browser
def test_a_loaded_file_is_what_it_says_and_marks_what_it_sets(visit, served):
    (served[1] / "short.toml").write_text("network_dim = 24\nlearning_rate = 0.0005\n", encoding="utf-8")
    visitor, lora = visit(), TABS[0]
    page = visitor.page
    page.get_by_placeholder("Config file").locator("visible=true").fill(str(served[1] / "short.toml"))
    visitor.click("Load config")
    visitor.until("Loaded short.toml for SDXL (2 settings differ from the defaults)")
    assert held(visitor, lora) == {"network_dim": 24, "learning_rate": 0.0005}  # the start's values are gone
    assert page.locator(".start:visible b").inner_text() == "short.toml"
    assert page.locator(".changed:visible [data-option]").count() == 2


VISITS = f"""([mine, others]) => {FORM}.then(({{ held, formOf }}) => {{
  const form = formOf("lora");
  const look = (name) => {{ form.querySelector(`[name=family][value=${{name}}]`).click(); return held(form); }};
  return others.map((other) => [look(other), look(mine)]); }})"""


class AnyFile(dict):
    """A model's files in any place."""

    def __missing__(self, name):
        return Path(f"/models/{name}.safetensors")


@pytest.mark.browser
def test_a_look_at_another_family_leaves_a_loaded_config_as_it_was(visit, served):
    """For each family: its demo's config, with a look at each other family. What the config sets carries over."""
    visitor, lora = visit(), TABS[0]
    page, place = visitor.page, visitor.page.get_by_placeholder("Config file").locator("visible=true")
    for family, config in lora.configs.items():
        path = served[1] / f"look-{family}.toml"
        images = Path("/images")
        path.write_text(
            configs.demo_toml(config.script, AnyFile(), images, served[1] / "out", family), encoding="utf-8"
        )
        place.fill(str(path))
        visitor.click("Load config")
        visitor.until(f"Loaded {path.name}")
        loaded, other_families = visitor.held(), [name for name in lora.configs if name != family]
        for other, (looked_at, back) in zip(
            other_families, page.evaluate(VISITS, [family, other_families]), strict=True
        ):
            assert looked_at["values"]["train_data_dir"] == str(images) and looked_at["values"]["network_dim"] == "8", (
                other
            )
            assert (
                looked_at["values"]["caption_extension"] == ".txt" and looked_at["values"]["enable_bucket"] is True
            ), other
            assert back == loaded, other


@pytest.mark.browser
def test_what_is_typed_for_one_family_is_there_again_when_it_is_chosen_again(visit):
    visitor = visit()
    value = lambda name: visitor.held()["values"][name]  # noqa: E731
    flux = start_preset.starts("lora", TABS[0].configs)["flux"]["values"]
    visitor.fill(learning_rate="0.0003", train_data_dir="/cats", network_dim=flux["network_dim"])
    visitor.family("FLUX.1")
    assert (value("learning_rate"), value("train_data_dir")) == ("0.0003", "/cats")
    visitor.fill(learning_rate="0.0005", max_train_steps="77")
    visitor.family("SDXL")
    assert (value("learning_rate"), value("max_train_steps")) == ("0.0003", "77")
    assert value("network_dim") == flux["network_dim"]  # nobody has typed FLUX.1's value
    visitor.fill(train_data_dir="/dogs")
    visitor.open()  # a reload keeps all of it
    visitor.family("FLUX.1")
    assert (value("learning_rate"), value("train_data_dir"), value("max_train_steps")) == ("0.0005", "/dogs", "77")


@pytest.mark.browser
def test_the_name_that_is_proposed_for_a_result_is_that_of_the_family(visit, served):
    path = served[1] / "named.toml"
    path.write_text('output_name = "sdxl-lora"\n', encoding="utf-8")
    visitor = visit()
    name = lambda: visitor.held()["values"]["output_name"]  # noqa: E731
    visitor.page.get_by_placeholder("Config file").locator("visible=true").fill(str(path))
    visitor.click("Load config")
    visitor.until("Loaded named.toml")
    visitor.family("FLUX.1")
    assert name() == "flux-lora"
    visitor.family("SDXL")
    assert name() == "sdxl-lora"
