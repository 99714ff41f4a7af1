"""Say what epcomm knows of Ascend NPUs and of the packages for them."""
