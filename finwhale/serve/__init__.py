"""Serving over HTTP: protocols that clients already speak, over one engine in one worker thread."""
