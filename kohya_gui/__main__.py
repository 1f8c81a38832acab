"""`python -m kohya_gui`: the page."""

from kohya_gui.app import main

raise SystemExit(main())
