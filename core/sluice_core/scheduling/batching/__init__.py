"""What an iteration of an engine holds: the batch policy of each strategy."""
