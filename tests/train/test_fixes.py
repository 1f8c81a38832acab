"""What is offered as a fix of a problem leads to a config without another one."""

import itertools

import pytest

from library import families
from library.check import machine
from library.config.building import Layer, build_config, read_layers, replace_options, working_fix
from library.config.schema import options_of
from library.families import RUNS, config_class

LORA, WHOLE_SDXL = (config_class(script) for script in ("sdxl_train_network", "sdxl_train"))
RULED = {(type(config.precision), type(config.optim)): type(config) for config in (config_class(one)() for one in RUNS)}


@pytest.mark.parametrize("cls", RULED.values(), ids=lambda cls: cls.script)
def test_no_fix_of_a_rule_leads_to_another_mistake(cls):
    """Every two switches of what is computed in which type, for every such set of rules that there is."""
    names = [name for name, one in options_of(cls).items() if one.section == "precision" and one.type is bool]
    pairs = [*itertools.combinations([*names, "fused_backward_pass"], 2)]
    for kind, pair in itertools.product(("no", "fp16"), pairs):
        options = {"mixed_precision": kind, "optimizer_type": "Adafactor", **dict.fromkeys(pair, True)}
        reading = read_layers(cls, [Layer(options)])
        before = {(one.option, one.template) for one in reading.problems}
        for problem in reading.problems:
            fix = working_fix(problem, reading.config)
            assert fix, (problem, options)
            left = read_layers(cls, [Layer({**options, **fix})]).problems
            assert problem not in left and {(one.option, one.template) for one in left} <= before, (options, fix, left)


BITS = ("fp8_base", "fp8_base_unet", "int8_base", "base_bits", "fp8_compute", "int8_compute", "auto_compute")
HALF = ("full_fp16", "full_bf16")


def clashes(cls):
    """Every one, two or three options of number formats, at each mixed precision, with every module of adapters."""
    names = [name for name in (*BITS, *HALF) if name in options_of(cls)]
    modules = ({}, {"network_module": "lycoris.kohya"}) if "network_module" in options_of(cls) else ({},)
    for kind, count, module in itertools.product(("no", "fp16", "bf16"), (1, 2, 3), modules):
        for chosen in itertools.combinations(names, count):
            yield {"mixed_precision": kind, **module, **{name: 4 if name == "base_bits" else True for name in chosen}}


@pytest.mark.parametrize("cls", {type(config().precision): config for config in RULED.values()}.values())
def test_all_fixes_of_clashing_formats_agree_and_leave_nothing_to_mend(cls):
    known = {}

    def read(options):
        """The reading of options and what mends each of its problems; the ways to a config without any soon meet."""
        key = frozenset(options.items())
        if key not in known:
            reading = read_layers(cls, [Layer(options)])
            known[key] = reading.problems, [working_fix(problem, reading.config) for problem in reading.problems]
        return known[key]

    for options in clashes(cls):
        problems, fixes = read(options)
        values = {name: {repr(fix[name]) for fix in fixes if name in fix} for fix in fixes for name in fix}
        assert all(fixes) and all(len(of_one) == 1 for of_one in values.values()), (options, fixes)
        mended = {name: value for fix in fixes for name, value in fix.items()}
        assert not read({**options, **mended})[0], (options, fixes)
        while problems:  # and pressed one after another
            assert fixes[0].items() - options.items(), (options, fixes[0])
            options |= fixes[0]
            problems, fixes = read(options)


def test_a_fix_brings_along_what_its_value_needs_or_switches_off_what_cannot_be():
    def fix(cls, option, **options):
        reading = read_layers(cls, [Layer(options)])
        return next(working_fix(problem, reading.config) for problem in reading.problems if problem.option == option)

    half = {"full_fp16": True, "fused_backward_pass": True, "optimizer_type": "Adafactor"}
    assert fix(WHOLE_SDXL, "full_fp16", **half) == {"full_fp16": False}
    products = {"int8_base": True, "fp8_compute": True, "mixed_precision": "bf16"}
    assert fix(LORA, "int8_base", **products) == {"int8_base": False, "fp8_base": True}


@pytest.mark.parametrize("script", [one for one in RUNS if families.facts_of(config_class(one).family).exceeds_fp16])
def test_a_model_that_exceeds_fp16_is_advised_a_config_that_works(script):
    for full in ({}, {"full_fp16": True}):
        config = build_config(config_class(script), {"mixed_precision": "fp16", **full}, notes=[])
        (said,) = machine.find_half_precision_notes(config)
        mended = replace_options(config, **working_fix(said, config))
        assert mended.precision.mixed_precision == "bf16" and mended.precision.full_bf16 is bool(full)
        assert ("full_bf16" in str(said)) is bool(full)
