pytest_plugins = ["tests.multi_rank"]
