"""What compiling was worth: told only where eager steps were timed, and never more than was measured."""

import pytest

from library.compiler.log import CompileLog
from library.compiler.speedup import Speedup


def after(eager, compiled, spent):
    savings = Speedup(eager_steps_left=len(eager))
    for step, seconds in enumerate((*eager, *compiled), start=1):
        savings.note_step(step, seconds, 0.0 if step <= len(eager) else spent)
    return savings


def test_the_first_step_and_steps_that_compile_count_for_neither_side():
    savings = after((None, 2.0, 2.0), (None, 1.0, 1.0, 1.0), spent=2.5)
    assert savings.facts(2.5) == {"eager_s_it": 2.0, "compiled_s_it": 1.0, "saved_seconds": 0.5, "paid_step": 7}
    assert savings.sentence(2.5).startswith("Compiling saved 0.5 s in total (1 s a step instead of 2 s,")
    assert savings.sentence(2.5).endswith("its time was recovered at step 7.")


def test_what_has_not_paid_for_itself_is_not_called_a_gain():
    savings = after((None, 2.0), (None, 1.0, 1.0), spent=30)
    assert savings.break_even_step is None and savings.facts(30)["saved_seconds"] == -28
    assert savings.sentence(30).startswith("Compiling has cost 28.0 s more than it saved so far")
    slower = after((None, 1.0), (None, 1.5, 1.5), spent=1)
    assert slower.facts(1)["saved_seconds"] == -2 and "more than it saved" in slower.sentence(1)


def test_a_late_recompilation_moves_the_step_at_which_it_has_paid():
    savings = after((None, 2.0), (None, 1.0, 1.0), spent=1.5)
    assert savings.break_even_step == 5
    savings.note_step(6, None, 4.0)
    assert savings.break_even_step is None
    for step in (7, 8, 9):
        savings.note_step(step, 1.0, 4.0)
    assert savings.break_even_step == 9


def test_without_eager_steps_nothing_is_reported_of_savings():
    savings = after((), (None, 1.0, 1.0), spent=1)
    assert savings.facts(1) == {} and savings.sentence(1) == ""
    log = CompileLog()
    assert log.sentence() == "" and log.curves() == {}
    log.expect("Block", ())
    assert log.curves() == {"compile/seconds": 0.0}


def test_a_comparison_of_one_step_is_refused():
    from library import families
    from library.config.building import build_config
    from library.config.problems import ConfigError

    with pytest.raises(ConfigError, match="compile_compare_steps = 1 measures nothing"):
        build_config(families.config_class("flux_train_network"), {"compile_compare_steps": 1})
