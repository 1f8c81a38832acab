"""Install this project's packages, and check that they match the locked versions. Loads only the standard library."""
