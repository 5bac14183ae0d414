"""Fuzz targets for everything that reads what others wrote."""
