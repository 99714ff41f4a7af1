"""The protocol of calls: every rank announces each call to all others before rows are sent."""
