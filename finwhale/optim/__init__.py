"""The optimisers of the report, and who owns which parameter."""
