"""Candidates for a layer, the choice of a plan, and its reasons."""
