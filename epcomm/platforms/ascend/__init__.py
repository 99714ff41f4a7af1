"""Ascend NPUs: chips, operators, formats, limits and environment variables."""
