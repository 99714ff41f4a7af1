"""Move, sum and number rows on one GPU, with nothing in them that needs a peer or NVLink."""
