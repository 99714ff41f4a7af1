"""Runners over the operators of Ascend NPUs."""
