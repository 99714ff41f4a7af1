"""`python -m epcomm`: the same commands as `epcomm`."""

from epcomm.cli import app

app(prog_name="epcomm")
