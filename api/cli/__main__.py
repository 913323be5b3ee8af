"""`python -m api.cli` is `everstep`."""

from .main import app

app(prog_name="everstep")
