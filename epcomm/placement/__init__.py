"""Assign the experts of a layer to ranks, with several copies of the loaded ones."""
