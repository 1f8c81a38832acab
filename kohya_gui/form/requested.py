"""Find the form of a request, and parse its contents."""

from collections.abc import Mapping
from typing import TypeVar

from kohya_gui.form.form import SettingsForm, Submission
from kohya_gui.server.json_api import NO_SUCH_CHOICE, ApiRequest
from library.config.problems import ConfigError

T = TypeVar("T")


def of_tab(items: Mapping[str, T], tab: str) -> T:
    """Return the item (a form, a tab) of the tab with this name. Raises ConfigError without such a tab."""
    if tab not in items:
        raise ConfigError(NO_SUCH_CHOICE)
    return items[tab]


def requested_submission(
    forms: Mapping[str, SettingsForm], request: ApiRequest, sent: str = "sent"
) -> tuple[SettingsForm, Submission]:
    """Return the form of a request's tab, and its contents from the field `sent`."""
    form = of_tab(forms, request.text("tab"))
    return form, form.parse_submission(request.text(sent))


def requested_family(forms: Mapping[str, SettingsForm], request: ApiRequest) -> tuple[SettingsForm, str]:
    """Return the form of a request's tab, and the requested family, which the form must have."""
    form = of_tab(forms, request.text("tab"))
    return form, request.choice("family", form.configs)
