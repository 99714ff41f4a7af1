"""Test backends with seeded data, an oracle, and suites for buffers and layers."""
