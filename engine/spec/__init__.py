"""Speculation: what is drafted, how much of it, and which of it the target confirms."""
