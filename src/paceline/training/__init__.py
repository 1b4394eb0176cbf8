"""Training of models: options, files, plan, driver, the worker's loop and trials of settings."""
