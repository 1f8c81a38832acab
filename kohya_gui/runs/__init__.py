"""The page's room *Runs*: a table of all runs, and a page for each."""
