"""The run folder: what happened, what was learned, and pictures of both."""
