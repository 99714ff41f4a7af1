"""Say what serves a layer: candidates, what a plan chose, and why."""
