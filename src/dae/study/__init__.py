"""Studies: an experiment file becomes runs in parallel, tidy CSVs with a manifest, a table and pictures."""
