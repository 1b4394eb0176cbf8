"""Store parsed examples as arrays in files. The cache and converted data use the format of :mod:`.blocks`."""
