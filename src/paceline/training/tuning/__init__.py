"""Choose the settings of a training by trials on a sample of its data."""
