"""Divide experts among ranks, in parameters that record which experts they hold."""
