"""The page's header, typeface and mark, and the lines of its head that name them."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

LOOK_FOLDER = Path(__file__).parent
MARK = (LOOK_FOLDER / "mark.svg").read_text(encoding="utf-8").strip()


def _file(name: str) -> tuple[str, bytes]:
    content = (LOOK_FOLDER / name).read_bytes()
    return f"/scripts/{hashlib.sha256(content).hexdigest()[:16]}/{name}", content


FONT, MARK_FILE = _file("inter.woff2"), _file("mark.svg")
LOOK_FILES = dict((FONT, MARK_FILE))

_HALF = (
    '<svg viewBox="0 0 16 16" aria-hidden="true"><path fill="currentColor" fill-rule="evenodd"'
    ' d="M8 1a7 7 0 1 0 0 14zm1 1.1v11.8a6 6 0 0 0 0-11.8z"/></svg>'
)
# Before anything is painted, so that a page whose user has chosen dark does not flash.
_COLOURS = """<script>(() => {
  let chosen = "";
  try { chosen = localStorage.getItem("kohya-colours"); } catch {}
  const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.classList.toggle("dark", dark);
})()</script>"""
# Letters outside of the typeface, such as those of Chinese, come from the system's fonts.
HEAD = (
    f'{_COLOURS}<link rel="icon" type="image/svg+xml" href=".{MARK_FILE[0]}">'
    f'<link rel="preload" as="font" type="font/woff2" crossorigin href=".{FONT[0]}">'
    '<style>@font-face { font-family: "Inter"; font-weight: 400 700; font-display: swap;'
    f' src: url(".{FONT[0]}") format("woff2"); }}</style>'
)


def header(title: str, mark: str, kinds: Iterable[str]) -> str:
    """Return the top of the page: its name, links and switches. The row of rooms is moved into it by frame.css.

    tab.js loads the forms of `kinds` with `mark`, also where the page is opened in a room without a form.
    """
    return (
        '<a class="skip" href="#work">Skip to the content</a>'
        f'<header data-mark="{mark}" data-kinds="{" ".join(kinds)}">'
        f'<h1><a class="brand" href="#train">{MARK}<span>{title}</span></a></h1>'
        '<div class="switches"><a href="tensorboard/" target="_blank" rel="noopener">TensorBoard</a>'
        f'<label class="scheme">{_HALF}<select class="colours" aria-label="Colours">'
        '<option value="">System</option><option value="light">Light</option><option value="dark">Dark</option>'
        '</select></label></div></header><div class="notices" role="status"></div>'
    )
