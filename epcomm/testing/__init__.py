"""What backends are tested with: seeded data, an oracle, suites for buffers and layers."""
