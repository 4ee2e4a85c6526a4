"""finwhale: an open, exact, readable implementation of DeepSeek-V4.1-Flash."""

__version__ = "0.1.0"
