"""Divide experts among ranks, with parameters that know which experts they hold."""
