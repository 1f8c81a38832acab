"""Dates and times read the same wherever the page shows them."""

import time

import pytest

from kohya_gui.server import scripts
from library.runs import dates
from library.runs.dates import duration_in_words
from tests import source

SHOWN = f"""
([words, value]) => import('.{scripts.ADDRESS}').then(({{ modules }}) => modules['i18n/dates.js'][words](value))
"""


@pytest.mark.browser
def test_a_moment_and_a_duration_have_the_words_of_the_panel(visit):
    page, now = visit().page, time.time()
    year = time.localtime().tm_year
    for month, hour in ((1, 0), (5, 9), (9, 14), (12, 23)):
        at = time.mktime((year, month, 28, hour, 7, 0, 0, 0, -1))
        assert page.evaluate(SHOWN, ["moment", at]) == str(dates.moment(at))
        before = time.mktime((year - 1, month, 28, hour, 7, 0, 0, 0, -1))
        assert page.evaluate(SHOWN, ["moment", before]) == f"{dates.date(before)} {hour:02}:07"
    assert page.evaluate(SHOWN, ["timeOfDay", now]) == time.strftime("%H:%M", time.localtime(now))
    for seconds in (0, 45, 89, 91, 3600, 12_000):
        assert page.evaluate(SHOWN, ["duration", seconds]) == str(duration_in_words(seconds))


def test_a_time_that_windows_does_not_convert_is_shown_as_the_nearest_one(monkeypatch):
    """A damaged record has any number, and a list with it is still shown."""
    real = time.localtime

    def of_windows(moment):
        if not 0 <= moment < 32_536_000_000:
            raise OSError(22, "Invalid argument")
        return real(moment)

    monkeypatch.setattr(time, "localtime", of_windows)
    assert dates.date(-5e9).arguments["year"] in ("1969", "1970") and dates.moment(2.0**53) and dates.date(2.0**53)


def test_no_other_script_writes_dates():
    paths = [path for path in (source.ROOT / "kohya_gui").rglob("*.js") if "vendor" not in path.parts]
    assert [path.name for path in paths if "new Date(" in path.read_text(encoding="utf-8")] == ["dates.js"]
