"""The routes, by noun. Each module has a list `ROUTES`; `table` joins them."""
