"""`python -m kohya_gui`: the page."""

from library.imports import without_collecting

with without_collecting():
    from kohya_gui.app import main

raise SystemExit(main())
