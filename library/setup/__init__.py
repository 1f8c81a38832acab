"""Install the packages of this project, and check that they are the locked ones. It loads the standard library only."""
