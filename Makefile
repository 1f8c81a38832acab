PYTHON := .venv/bin/python

.PHONY: style check test docs

style:  ## put every file into shape
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

check:  ## what can be said without running the code: style, types, layers, budgets
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pyright
	$(PYTHON) -m pytest tests/test_layers.py tests/test_budgets.py

test:  ## everything, as CI runs it
	./setup.sh test

docs:  ## docs/options.md, from the options
	$(PYTHON) -m library.cli.options_page
