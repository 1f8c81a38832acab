"""A pattern of a config cannot keep a check busy forever."""

import pytest

from library.config.problems import ConfigError
from library.config.regexes import refuse_endless
from library.families.shared.network_args import patterns, regexes

ENDLESS = [
    *(r"^(\w+\.?)+!$", r"(a|a)*b", r"(a?){30}b", r"((a+)b?)*c", r"(?:x*)+", r"(?P<n>\d+,?)+$", r"([a-z]+)*\1"),
    *(r"(.*)*", r".*a.*b.*c.*d.*e.*f.*g", r"(?=(\w+)+!)", r"(\(+)+", r"([)]+)+", r"(?i:a+)+", r"(?:a+)*?b"),
]
USUAL = [
    *(r".*attn.*", r".*(img_mod|txt_mod|modulation).*", r"(?:double|single)_blocks\.(\d+)\..*", r"blocks\.\d{1,2}\."),
    *(r".*\.to_(?:q|k|v)$", r"(?!.*norm).*mlp.*", r"[^.]+\.[(+*]+\.x?", r"lora_unet_(\w+)?", r"(abc)+", r"(\.\d)?a"),
]


@pytest.mark.parametrize("pattern", ENDLESS)
def test_what_can_take_forever_is_refused(pattern):
    for read in (refuse_endless, lambda one: regexes(str([one])), lambda one: patterns(f"{one}=4", int)):
        with pytest.raises(ConfigError, match="can take forever to match"):
            read(pattern)


@pytest.mark.parametrize("pattern", USUAL)
def test_usual_patterns_are_taken(pattern):
    assert regexes(str([pattern])) == (pattern,)
