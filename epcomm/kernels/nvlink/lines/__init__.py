"""Say what low latency over NVLink does with few tokens: lines, see common/lines.py."""
