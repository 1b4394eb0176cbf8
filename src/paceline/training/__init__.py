"""Training of models: options, files, plan, driver, worker and trials of settings."""
