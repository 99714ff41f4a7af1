"""Adapters to model libraries; none is imported before it is used."""
