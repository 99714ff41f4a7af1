"""Adapt epcomm to model libraries; no adapter is imported before it is used."""
