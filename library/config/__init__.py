"""Options declared once: flags, TOML, form, docs and checks are derived from them."""
