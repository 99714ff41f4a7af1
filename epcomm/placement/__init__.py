"""Say where the experts of a layer lie, with several copies of the loaded ones."""
