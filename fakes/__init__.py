"""Imitations of vendor packages on a CPU; they are no part of the wheel."""
