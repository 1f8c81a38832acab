"""The page's look: Gradio's own parts take the colours of page.css."""

from pathlib import Path

from gradio.themes import Base, sizes

from kohya_gui.server.vendored import VENDOR_FOLDER

PAGE_FOLDER = Path(__file__).parents[1]


# All style sheets: page.css first, as those of single tabs build on it, and touch.css last, as it enlarges what they
# have. In the head instead of Gradio's css=, which rewrites selectors and sends each rule twice.
SHEETS = sorted(
    (file for file in PAGE_FOLDER.rglob("*.css") if VENDOR_FOLDER not in file.parents),
    key=lambda file: (file.stem not in ("page", "frame"), file.stem == "touch", file),
)
THEME_HEAD = "".join(f"<style>{sheet.read_text(encoding='utf-8')}</style>" for sheet in SHEETS)

# Gradio has a separate dark variant of each; our colours follow the mode by themselves.
THEME_VARIABLES = {
    "body_background_fill": "var(--ground)",
    "body_text_color": "var(--text)",
    "body_text_color_subdued": "var(--quiet)",
    "background_fill_primary": "var(--card)",
    "background_fill_secondary": "var(--sunken)",
    "block_background_fill": "var(--card)",
    "block_border_color": "var(--edge)",
    "block_label_text_color": "var(--text)",
    "block_title_text_color": "var(--text)",
    "block_info_text_color": "var(--quiet)",
    "border_color_primary": "var(--edge)",
    "border_color_accent": "var(--accent)",
    "input_background_fill": "var(--card)",
    "input_border_color": "var(--field-edge)",
    "input_border_color_focus": "var(--accent)",
    "input_placeholder_color": "var(--quiet)",
    "button_primary_background_fill": "var(--accent)",
    "button_primary_background_fill_hover": "color-mix(in srgb, var(--accent) 88%, var(--text))",
    "button_primary_text_color": "var(--on-accent)",
    "button_primary_border_color": "var(--accent)",
    "button_secondary_background_fill": "var(--card)",
    "button_secondary_background_fill_hover": "var(--sunken)",
    "button_secondary_text_color": "var(--text)",
    "button_secondary_border_color": "var(--field-edge)",
    "button_cancel_background_fill": "var(--card)",
    "button_cancel_background_fill_hover": "var(--bad-soft)",
    "button_cancel_text_color": "var(--bad)",
    "button_cancel_border_color": "var(--bad)",
}

THEME = Base(
    primary_hue="indigo",
    neutral_hue="stone",
    text_size=sizes.text_md,
    spacing_size=sizes.spacing_md,
    radius_size=sizes.radius_md,
    font=["Inter", "system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "sans-serif"],
    font_mono=["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"],
).set(
    **{f"{name}{mode}": value for name, value in THEME_VARIABLES.items() for mode in ("", "_dark")},
    button_border_width="1px",
    button_border_width_dark="1px",
    input_border_width="1px",
    input_border_width_dark="1px",
)
