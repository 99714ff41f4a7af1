"""The contenders, which move tokens to experts and results back: epcomm and plain torch."""
